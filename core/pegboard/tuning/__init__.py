"""`pegboard tune`: in which way a part's kernels are fastest on this device, measured once and written down."""

from .tune import TunedWay as TunedWay
from .tune import TuneReport as TuneReport
from .tune import tune as tune
