"""From NIfTI to lake tables: safe reading, mapping, the geometry gate, one pass over all thresholds, rankings."""
