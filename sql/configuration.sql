-- One row per configuration of a study with several training sets: a model with the maps of one of its training sets.
-- key: method_id
-- columns: model_id, training_set?, is_primary, position, model_position, is_ranked, reason?
select
    -- a model whose primary maps are held out takes no part with any other maps: the multiverse does not know it
    c.method_id, c.model_id, c.training_set,
    c.kind = 'method' as is_primary,
    c.position,
    p.position as model_position,
    r.is_ranked and p.is_ranked as is_ranked,
    coalesce(r.reason, p.reason) as reason
from method as c
join ranked_method as r on r.method_id = c.method_id
join ranked_method as p on p.method_id = c.model_id
where c.kind <> 'baseline' and exists (select 1 from method where kind = 'configuration')
