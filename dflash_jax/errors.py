"""Errors of configs and loading; each message names the file, the field and both values."""


class DFlashError(ValueError):
    """Base of what this library raises about configs, checkpoints and their combination."""


class ConfigError(DFlashError):
    """A config field is missing, contradictory, out of range or not supported."""


class WeightsError(DFlashError):
    """Tensors of a checkpoint do not match its config; all mismatches are listed together."""


class LoadError(DFlashError):
    """A path, hub id or alias cannot be loaded, or a drafter does not fit its target."""
