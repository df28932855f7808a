from collections.abc import Mapping

class InMemoryStoreBackendDefaults:
    def __init__(self, init_temp_docs_sites: bool = False) -> None: ...

class ProgressBarsConfig:
    def __init__(self, globally: bool | None = None) -> None: ...

class DataContextConfig:
    def __init__(
        self,
        *,
        store_backend_defaults: InMemoryStoreBackendDefaults,
        data_docs_sites: Mapping[str, object],
        progress_bars: ProgressBarsConfig,
        analytics_enabled: bool,
    ) -> None: ...
