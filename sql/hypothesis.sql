-- One row per hypothesis and configuration set: the verdict, with the case that decides it.
-- key: hypothesis_id, configuration_set
-- columns: position, statement, criterion, required_cases, item?, estimate?, estimate_low?, estimate_high?,
--   criterion_margin?, supported_count, case_count, undecided_count, verdict, reason
-- stop: supported_count <= case_count | more cases support a hypothesis than it has; report this defect
with listed as (
    select configuration_set from ledger_set union select configuration_set from hypothesis_case
),
-- the deciding case comes nearest to what is asked: the best where any will do, the worst where every one must
ranked as (
    select
        h.*, k.required_cases,
        row_number() over (
            partition by h.hypothesis_id, h.configuration_set
            order by
                case k.required_cases when 'any' then -h.criterion_margin else h.criterion_margin end nulls last,
                h.item
        ) as place
    from hypothesis_case as h
    join hypothesis_criterion as k using (hypothesis_id)
),
counted as (
    select
        hypothesis_id, configuration_set,
        count(*) filter (is_supported) as supported_count,
        count(is_supported) as case_count,
        count(*) filter (is_supported is null) as undecided_count
    from hypothesis_case
    group by all
)
select
    k.hypothesis_id, l.configuration_set, k.position, k.statement, k.criterion, k.required_cases,
    r.item, r.estimate, r.estimate_low, r.estimate_high, r.criterion_margin,
    coalesce(c.supported_count, 0) as supported_count,
    coalesce(c.case_count, 0) as case_count,
    coalesce(c.undecided_count, 0) as undecided_count,
    case
        when coalesce(c.case_count, 0) = 0 then 'not_testable'
        when k.required_cases = 'any' and c.supported_count > 0 then 'supported'
        when k.required_cases = 'every' and c.supported_count = c.case_count then 'supported'
        else 'not_supported'
    end as verdict,
    -- a study's own SELECT may list cases of the primary set alone
    coalesce(
        r.reason,
        case when p.hypothesis_id is not null then 'no case with these maps: ' else '' end || 'needs ' || k.needs
    ) as reason
from hypothesis_criterion as k
cross join listed as l
left join ranked as r
    on r.hypothesis_id = k.hypothesis_id and r.configuration_set = l.configuration_set and r.place = 1
left join counted as c on c.hypothesis_id = k.hypothesis_id and c.configuration_set = l.configuration_set
left join counted as p on p.hypothesis_id = k.hypothesis_id and p.configuration_set = 'primary'
where c.hypothesis_id is not null or l.configuration_set in (select configuration_set from ledger_set)
