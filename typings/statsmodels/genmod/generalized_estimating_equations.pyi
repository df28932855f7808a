import numpy as np
from numpy.typing import ArrayLike, NDArray
from statsmodels.genmod.cov_struct import Exchangeable
from statsmodels.genmod.families import Binomial

class GEEResults:
    params: NDArray[np.float64]
    bse: NDArray[np.float64]
    converged: bool

class GEE:
    def __init__(
        self, endog: ArrayLike, exog: ArrayLike, groups: ArrayLike, *, family: Binomial, cov_struct: Exchangeable
    ) -> None: ...
    def fit(self, maxiter: int = ...) -> GEEResults: ...
