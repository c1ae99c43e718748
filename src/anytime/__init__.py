"""anytime: train neural networks without knowing how long you will train."""

from .batch_norm import recalibrate_batch_norm
from .optim.base import AnytimeOptimizer
from .optim.migrate import start_from
from .optim.modes import Iterates
from .optim.scheduled import AdamW, Lion, Muon, NorMuon, Shampoo, SignSGD, SpectralDescent
from .optim.sf_elementwise import SFSGD, SFAdamW, SFLion
from .optim.sf_plus import SFPlus
from .optim.sf_spectral import SFMuon, SFNorMuon, SFSpectralSGD
from .version import __version__

__all__ = [
    "SFSGD",
    "AdamW",
    "AnytimeOptimizer",
    "Iterates",
    "Lion",
    "Muon",
    "NorMuon",
    "SFAdamW",
    "SFLion",
    "SFMuon",
    "SFNorMuon",
    "SFPlus",
    "SFSpectralSGD",
    "Shampoo",
    "SignSGD",
    "SpectralDescent",
    "__version__",
    "recalibrate_batch_norm",
    "start_from",
]
