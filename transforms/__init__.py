"""Numerics over lake tables and marts that SQL cannot say well."""

from transforms.catalog import Transform
from transforms.ceilings import ceiling_interval, segment_ceiling
from transforms.configurations import (
    configuration_baseline_contrast,
    configuration_contrast_estimate,
    configuration_statistic,
)
from transforms.conformal import conformal_law, conformal_split, exceedance_interval, rule_law
from transforms.contrasts import contrast_estimate, gap_interval, operating_interval
from transforms.determinants import determinant
from transforms.diagnostics import diagnostic_power
from transforms.gains import gain_interval
from transforms.levels import dropped_level
from transforms.local_contrast import local_contrast_interval
from transforms.multiverse import replicate_level, replicate_statistic
from transforms.selection import configuration_choice
from transforms.slices import slice_auroc
from transforms.thresholds import calibration_rule

TRANSFORMS: dict[str, Transform] = {
    transform.table.name: transform
    for transform in (
        calibration_rule,
        dropped_level,
        rule_law,
        conformal_law,
        conformal_split,
        exceedance_interval,
        replicate_level,
        replicate_statistic,
        contrast_estimate,
        operating_interval,
        gap_interval,
        configuration_statistic,
        configuration_contrast_estimate,
        configuration_baseline_contrast,
        configuration_choice,
        gain_interval,
        local_contrast_interval,
        segment_ceiling,
        ceiling_interval,
        determinant,
        slice_auroc,
        diagnostic_power,
    )
}

__all__ = ["TRANSFORMS", "Transform"]
