from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd
from great_expectations.data_context.types.base import DataContextConfig
from great_expectations.expectations import Expectation

class ExpectationConfiguration:
    type: str
    kwargs: dict[str, Any]
    description: str
    notes: str
    severity: str

class ExpectationValidationResult:
    success: bool
    expectation_config: ExpectationConfiguration
    result: dict[str, Any]
    exception_info: dict[str, Any]

class ExpectationSuiteValidationResult:
    success: bool
    results: list[ExpectationValidationResult]

class ExpectationSuite:
    def __init__(self, *, name: str, expectations: Sequence[Expectation]) -> None: ...

class BatchDefinition: ...

class DataFrameAsset:
    def add_batch_definition_whole_dataframe(self, name: str) -> BatchDefinition: ...

class PandasDatasource:
    def add_dataframe_asset(self, name: str) -> DataFrameAsset: ...

class ValidationDefinition:
    def __init__(self, *, name: str, data: BatchDefinition, suite: ExpectationSuite) -> None: ...
    def run(
        self, *, batch_parameters: Mapping[str, pd.DataFrame], result_format: Mapping[str, object]
    ) -> ExpectationSuiteValidationResult: ...

class DataSources:
    def add_pandas(self, name: str) -> PandasDatasource: ...

class SuiteFactory:
    def add(self, suite: ExpectationSuite) -> ExpectationSuite: ...

class ValidationDefinitionFactory:
    def add(self, validation: ValidationDefinition) -> ValidationDefinition: ...

class EphemeralDataContext:
    data_sources: DataSources
    suites: SuiteFactory
    validation_definitions: ValidationDefinitionFactory
    def build_data_docs(self, *, build_index: bool = True) -> dict[str, str]: ...

def get_context(*, mode: Literal["ephemeral"], project_config: DataContextConfig) -> EphemeralDataContext: ...
