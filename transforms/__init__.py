"""Numerics over lake tables and marts that SQL cannot say well."""

from transforms.catalog import Transform
from transforms.levels import dropped_level
from transforms.thresholds import calibration_rule

TRANSFORMS: dict[str, Transform] = {t.table.name: t for t in (calibration_rule, dropped_level)}

__all__ = ["TRANSFORMS", "Transform"]
