-- One row per universe set and metric (each and `all`): the pair of methods that flips most.
-- key: universe_set, metric_id
-- columns: value, method_a, method_b
select universe_set, metric_id, flip_share as value, method_a, method_b
from flip_share
where not is_baseline_pair
qualify row_number() over (
    partition by universe_set, metric_id
    order by flip_share desc, method_a, method_b
) = 1
