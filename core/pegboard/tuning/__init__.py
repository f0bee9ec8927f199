"""`pegboard tune`: in which way a part's kernels are fastest on this device, measured once and written down."""

from .choosing import ROWS as ROWS
from .choosing import TunedWay as TunedWay
from .choosing import TuneReport as TuneReport
from .choosing import tune as tune
