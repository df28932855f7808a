-- One row per family of contrasts that are adjusted together: how many there are, were tested, and stand.
-- key: family
-- columns: contrast_count, tested_count, significant_count, is_resolvable
-- warn: is_resolvable or tested_count = 0 | no contrast of this family can fall to 0.05 after adjustment, however clear; raise contrast_replicates
select
    family,
    count(*) as contrast_count,
    count(p_value) as tested_count,
    count(*) filter (p_holm <= 1 - interval_level) as significant_count,
    bool_or(is_resolvable) as is_resolvable
from paired_contrast
cross join protocol
group by family
