"""Mixed precision (Micikevicius et al., 1710.03740): 16-bit compute, fp32 master weights, loss scaling."""

from zeroshard.precision.cast import DTYPES, Precision, keep_in_fp32
from zeroshard.precision.clash import explain_clash, raise_clash
from zeroshard.precision.loss_scale import LossScaler

__all__ = ["DTYPES", "LossScaler", "Precision", "explain_clash", "keep_in_fp32", "raise_clash"]
