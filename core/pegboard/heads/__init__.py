"""`pegboard train-heads`: a speculator's heads learn from what their target writes."""

from .records import Acceptance as Acceptance
from .records import HeadsReport as HeadsReport
from .records import HeadsSettings as HeadsSettings
from .train import train_heads as train_heads
