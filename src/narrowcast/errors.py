"""Every exception that narrowcast raises.

Each message names the argument, the rule it broke, what it was, and the line that fixes it. All of them
derive from `NarrowcastError`, and from the builtin that a caller would expect to catch.
"""


class NarrowcastError(Exception):
    """The base of every exception below."""


class SpecError(NarrowcastError, ValueError):
    """A codec was asked for that does not exist, or with options that cannot be."""


class GridError(SpecError, AssertionError):
    """A grid of additive powers of two cannot have these bits. PyTorch's observer asserts it, hence the second base."""


class DtypeError(NarrowcastError, TypeError):
    """A tensor has a dtype that codecs do not take."""


class ShapeError(NarrowcastError, ValueError):
    """A tensor has the wrong shape, device or layout for the call."""


class UnsupportedError(SpecError, RuntimeError):
    """`auto_quantize` does not know a collective or type. PyTorch's raises a RuntimeError, hence the second base."""


class NoTensorError(DtypeError, RuntimeError):
    """Something else than a tensor of numbers was given, for which PyTorch's `auto_quantize` raises a RuntimeError."""


class MatrixError(ShapeError, AssertionError):
    """A matrix was expected. PyTorch's `LinearAPoT` asserts it, hence the second base."""


class CheckedStepError(SpecError, AssertionError):
    """A step lies beyond the last one. PyTorch's AdaRound asserts it, hence the second base."""


class PayloadError(NarrowcastError, ValueError):
    """Encoded bytes do not fit the codec, shape or dtype they come with."""


class CollectiveError(NarrowcastError, RuntimeError):
    """A collective could not finish: a peer is gone, too late, or failed on its side."""

    failure: object = None
    """What ranks told each other about it."""


class MismatchError(CollectiveError, ValueError):
    """Ranks called the same collective with arguments that do not fit each other. Nothing was sent."""


class KernelWarning(UserWarning):
    """The plain-torch reference runs where a compiled kernel could."""


class BudgetError(NarrowcastError, ValueError):
    """No mix of the codecs on offer is as small as the budget asks."""


class PlotError(NarrowcastError, RuntimeError):
    """A figure cannot be drawn: matplotlib is missing, or the file has no picture's ending."""


class ExportError(NarrowcastError, ValueError):
    """A quantized weight has no place in the format it is to be written in."""


class CheckpointError(NarrowcastError, ValueError):
    """A file or folder is not a checkpoint that can be trusted: cut, changed, or lying about what it holds."""


class NewerVersionError(CheckpointError):
    """A checkpoint was written by a later narrowcast, in a format that this one does not know."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """A checkpoint, or a file that its index names, is not there."""


class ReplacedError(CheckpointError):
    """A checkpoint was replaced while it was being read."""


class ModelMismatchError(CheckpointError):
    """A checkpoint and a model do not have the same tensors. The model is as it was."""


class LoadWarning(UserWarning):
    """A model was loaded, but not all of it as one may expect: something is decoded, or held by somebody else."""


class QuantizeError(NarrowcastError, ValueError):
    """A model cannot be quantized as asked. It was left as it was."""


class StateDictError(NarrowcastError, RuntimeError):
    """A state dict, or a description of one, is not of this model's layout. The model was left as it was."""


class TargetError(CheckpointError):
    """The place to write to is taken."""


class GradientError(NarrowcastError, RuntimeError):
    """A gradient was asked for that an operation does not have."""


class OptimizerError(NarrowcastError, ValueError):
    """An optimizer cannot do what was asked: it does not hold a parameter, or not the state that the call needs."""


class ModelKindError(NarrowcastError, TypeError):
    """A model is not of the kind that a call is for."""


class CaptureError(NarrowcastError, RuntimeError):
    """A decoding step cannot be captured as a CUDA graph."""


class LogitsError(NarrowcastError, ArithmeticError):
    """A decoder's logits are NaN or infinite: no token can be chosen."""


class CalibrationError(NarrowcastError, RuntimeError):
    """A quantizer has no clip yet, or no data to choose one from."""


class ClipWarning(UserWarning):
    """A learned clip left the positive numbers; training goes on at the smallest clip there is."""
