"""`pegboard quantize`: a checkpoint is measured, its linears are written by a quantizer part, and measured again."""

from .convert import QuantizeReport as QuantizeReport
from .convert import quantize as quantize
