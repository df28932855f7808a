"""What a release says, as short tables for the terminal: gate, operating points, flips, variance, what was dropped.

Each finding is a title, a SELECT over the marts and a sentence on how to read it; analysts can run the same SELECT.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import duckdb

from marts.release import first_row


@dataclass(frozen=True)
class Shown:
    """One table of findings."""

    title: str
    reading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Question:
    """A question with the SELECT that answers it."""

    title: str
    reading: str
    sql: str


QUESTIONS = (
    Question(
        "Geometry gate",
        "Does each map lie where its reference does? Subjects per verdict; median overlap of the two references; margin"
        " of the declared transform over the best of the others. A failed method is never ranked.",
        """
        select
            method_id as method, verdict,
            n_subjects as n, passed_count as passed,
            label_fidelity_count as fidelity, misregistered_count as misplaced,
            not_assessable_count as unclear,
            format('{:.3f}', dice_in_view_median) as overlap,
            format('{:+.3f}', margin) as margin
        from gate_summary join ranked_method using (method_id)
        order by position
        """,
    ),
    Question(
        "Geometry without labels of it (test subjects)",
        "A low stability, many anti-located subjects or a better candidate: look where the maps lie. Power is"
        " the lowest over flips and transposes, in resampled cohorts of the largest size asked for.",
        """
        select
            d.method_id as method,
            format('{:.2f}', max(d.value) filter (d.diagnostic_id = 'rank_stability')) as stability,
            format('{:.0f} %', 100 * max(d.value) filter (d.diagnostic_id = 'anti_location')) as "anti-located",
            format('{:+.3f}', max(d.value) filter (d.diagnostic_id = 'transform_scan')) as "scan gain",
            max(d.candidate) as "best candidate",
            format('{:.2f}', any_value(p.stability_power)) as "power, stability",
            format('{:.2f}', any_value(p.location_power)) as "power, anti-location"
        from diagnostic as d
        join ranked_method as m using (method_id)
        join (
            select
                method_id,
                min(power) filter (diagnostic_id = 'rank_stability') as stability_power,
                min(power) filter (diagnostic_id = 'anti_location') as location_power
            from diagnostic_power
            where variant_id in ('flip_left_right', 'flip_anterior_posterior', 'transpose') and power is not null
                and sample_size = (select max(sample_size) from diagnostic_power where sample_id <> 'all')
            group by method_id
        ) as p using (method_id)
        group by d.method_id, m.position
        order by m.position
        """,
    ),
    Question(
        "Operating points at the reference budget (plain maps, test subjects)",
        "The budget (cm3) only names how the threshold was chosen; mean, median and 95th percentile of the"
        " false-positive volume are what it came to, and above is the share of subjects beyond the budget. A rule"
        " that says crossfit has a threshold for every fold of the test subjects, chosen on the others.",
        """
        select
            o.method_id as method,
            o.threshold_rule_id || case when o.threshold is null then ', crossfit' else '' end as rule,
            format('{:.3f}', o.threshold) as "at",
            format('{:.3f}', o.dice_mean) as "Dice", o.n_dice as n,
            format('{:.1f} of {:g}', o.burden_cm3_mean, o.budget_cm3) as "cm3 mean",
            format('{:.1f}', o.burden_cm3_median) as median,
            format('{:.1f}', o.burden_cm3_p95) as p95,
            format('{:.0f} %', 100 * o.exceedance) as above
        from operating_point as o
        join ranked_method as m using (method_id)
        cross join protocol
        where o.postprocess_id = 'plain' and o.budget_cm3 = protocol.reference_budget_cm3
            and m.kind <> 'configuration'
            and o.threshold_rule_id in ('validation', 'crc_10', 'test_matched')
        order by m.position, o.threshold_rule_id desc
        """,
    ),
    Question(
        "Pairs that flip (defensible universes)",
        "Share of universes in which a pair takes its minority order, with medians over universes. Near a half it is"
        " the evaluation's doing only if both leads are sizeable; else the two are merely close. Holm: Dice contrasts"
        " at validation thresholds (all budgets and aggregations) that stand after adjustment, each way.",
        """
        select
            metric_id as metric, method_a || ' vs ' || method_b as pair,
            format('{:.3f}', flip_share) || coalesce(format(' [{:.2f}, {:.2f}]', flip_share_low, flip_share_high), '')
                as "flip share",
            format('{:.4f}', median_abs_difference) as "|difference|",
            coalesce(format('{:.4f}', median_lead_a), '-') as "first leads by",
            coalesce(format('{:.4f}', median_lead_b), '-') as "second by",
            format('{} / {}', significant_a, significant_b) as "Holm",
            greater_count + less_count + tie_count as universes
        from flip_share
        where universe_set = 'defensible' and not is_baseline_pair and flip_share > 0 and metric_id <> 'all'
        order by flip_share desc, metric_id, pair
        limit 12
        """,
    ),
    Question(
        "Whose is the variance? (defensible universes)",
        "Within a metric, the ranking belongs to the method where the method's share is near 1.",
        """
        select
            metric_id as metric,
            format('{:.3f}', max(share) filter (term = 'method')) as method,
            format('{:.3f}', max(share) filter (term = 'axes')) as axes,
            format('{:.3f}', max(share) filter (term = 'remainder')) as remainder,
            max_by(term, share) filter (term not in ('total', 'method', 'axes', 'remainder')) as "largest term",
            format('{:.3f}', max(share) filter (term not in ('total', 'method', 'axes', 'remainder'))) as "its share"
        from variance_share
        where universe_set = 'defensible'
        group by metric_id
        order by metric_id = 'all', metric_id
        """,
    ),
    Question(
        "Orders of the methods (defensible universes)",
        "An order that every universe gives belongs to the methods; several orders belong to the evaluation.",
        """
        select metric_id as metric, method_order as "order", format('{:.1f} %', 100 * share) as universes
        from order_share
        where universe_set = 'defensible' and order_kind = 'weak'
        qualify row_number() over (partition by metric_id order by share desc, method_order) <= 3
        order by metric_id = 'all', metric_id, share desc, method_order
        """,
    ),
    Question(
        "Contrasts in mean Dice at the reference budget",
        "First less second over the same test subjects, with the validation thresholds that a user would have, and at"
        " equal burden, where both spend exactly the budget; p is adjusted by Holm within its family.",
        """
        select
            method_a || ' less ' || method_b as pair,
            max(format('{:+.3f} [{:+.3f}, {:+.3f}]', estimate, estimate_low, estimate_high))
                filter (where operating_point = 'validation') as "validation",
            max(format('{:.4f}', p_holm)) filter (where operating_point = 'validation') as p,
            max(format('{:+.3f} [{:+.3f}, {:+.3f}]', estimate, estimate_low, estimate_high))
                filter (where operating_point = 'equal_burden') as "equal burden",
            max(format('{:.4f}', p_holm)) filter (where operating_point = 'equal_burden') as "p ",
            max(n_subjects) as n
        from paired_contrast as c
        join ranked_method as a on a.method_id = c.method_a
        join ranked_method as b on b.method_id = c.method_b
        cross join protocol
        where metric_id = 'dice' and aggregation_id = 'mean' and budget_cm3 = protocol.reference_budget_cm3
            and estimate is not null
        group by method_a, method_b, a.position, b.position, b.kind
        order by b.kind = 'baseline', a.position, b.position
        """,
    ),
    Question(
        "Hypotheses",
        "The claims of the protocol, each decided by a SELECT (column sql of hypothesis_criterion) that a study can"
        " replace; hypothesis_case holds every case, and cases counts those that support the claim.",
        """
        select
            hypothesis_id as id, split_part(statement, ':', 1) as hypothesis,
            replace(verdict, '_', ' ') as verdict,
            case when case_count > 0 then format('{} of {}', supported_count, case_count) end as cases,
            format('{:.3f}', estimate) || coalesce(format(' [{:.3f}, {:.3f}]', estimate_low, estimate_high), '')
                as estimate,
            reason as why
        from hypothesis
        where configuration_set = 'primary'
        order by position
        """,
    ),
    Question(
        "Hypotheses with other training sets",
        "Verdicts that are not those of the primary maps; hypothesis holds all of them, by configuration_set.",
        """
        select
            h.configuration_set as "set",
            case
                when any_value(s.same_as) = 'primary' then 'none: these are the primary maps'
                else coalesce(
                    string_agg(h.hypothesis_id || ' ' || replace(h.verdict, '_', ' '), ', ' order by h.position)
                        filter (h.verdict <> p.verdict),
                    'none'
                )
            end as "verdicts that differ"
        from hypothesis as h
        join ledger_set as s on s.configuration_set = h.configuration_set
        join hypothesis as p on p.hypothesis_id = h.hypothesis_id and p.configuration_set = 'primary'
        where h.configuration_set <> 'primary'
        group by h.configuration_set
        order by any_value(s.position)
        """,
    ),
    Question(
        "Levels that left the multiverse",
        "Dropped for all methods, so that every remaining universe has a score for each.",
        """
        select axis_column as axis, level_id as level, reason
        from dropped_level
        order by position
        """,
    ),
    Question(
        "Which training set? (each rule on its own cohort)",
        "How often resampled cohorts repeat the choice, and the mean test Dice that it gives away against the best"
        " training set of the method. A rule on test is a diagnostic, never a way to choose.",
        """
        select
            s.model_id as method, s.selection_rule_id as rule,
            s.training_set as choice,
            format('{:.1f} %', 100 * s.choice_share) as repeated,
            case when s.is_stable then 'stable' else 'unstable' end as label,
            format('{:.3f}', s.test_regret) as regret,
            format('{:.3f} [{:.3f}, {:.3f}]', s.regret_mean, s.regret_low, s.regret_high) as "over resamples"
        from selection as s
        join configuration as c on c.method_id = s.model_id
        where s.status <> 'unavailable'
        order by s.position, c.position
        """,
    ),
    Question(
        "Orders with other training sets (defensible universes)",
        "Share of universes in which the methods come in another order than with the primary training set.",
        """
        select
            configuration_set as "set",
            format('{:.1f} %', 100 * max(share) filter (metric_id = 'all')) as "all metrics",
            format('{:.1f} %', 100 * max(share) filter (metric_id = 'dice')) as "Dice",
            format('{:.1f} %', 100 * max(share) filter (metric_id = 'lesion_sensitivity')) as "lesion sens.",
            format('{:.1f} %', 100 * max(share) filter (metric_id = 'voxel_auroc')) as "voxel AUROC",
            format('{:.1f} %', 100 * max(share) filter (metric_id = 'voxel_ap')) as "voxel AP",
            format('{:.1f} %', 100 * max(share) filter (metric_id = 'slice_auroc')) as "slice AUROC",
            format('{:.1f} %', 100 * max(share) filter (metric_id = 'slice_aroc')) as "slice AROC",
            max(universe_count) as universes, max(unscored_count) as "left out"
        from configuration_order
        where universe_set = 'defensible' and configuration_set in (
            select m.configuration_set
            from configuration_member as m
            join configuration as c on c.method_id = m.method_id and not c.is_primary
        )
        group by configuration_set
        order by configuration_set
        """,
    ),
    Question(
        "Training sets that are no level of the eleventh axis",
        "The variance with the training set as an axis is balanced: every method must have the training set, with a"
        " score wherever the primary maps have one.",
        """
        select universe_set as universes, training_set as "training set", reason
        from configuration_level
        where status <> 'ok'
        order by position, universes
        """,
    ),
)


def answers(connection: duckdb.DuckDBPyConnection) -> Iterator[Shown]:
    """Run every question on a release; a question without an answer (no flips, nothing dropped) says so by no rows."""
    for question in QUESTIONS:
        result = connection.execute(question.sql)
        columns = tuple(str(column[0]) for column in result.description or ())
        rows = tuple(tuple("-" if v is None else str(v) for v in row) for row in result.fetchall())
        yield Shown(question.title, question.reading, columns, rows)


def summary(connection: duckdb.DuckDBPyConnection) -> str:
    """One sentence: how many universes were planned and scored, of how many methods and subjects."""
    row = first_row(
        connection,
        """
        select
            (select count(*) from universe), (select count(*) filter (status = 'ok') from universe),
            (select count(*) filter (status = 'ok' and is_defensible) from universe),
            (select count(*) filter (kind = 'method' and is_ranked) from ranked_method),
            (select count(*) filter (is_included and split = 'test') from cohort_subject),
            (select count(*) filter (is_included and split = 'validation') from cohort_subject),
            (select count(*) filter (not is_included) from cohort_subject),
            (select calibration_share from protocol), (select max(fold_count) from crossfit_fold)
        """,
    )
    planned, scored, defensible, methods, test, validation, excluded, share, folds = row or (0,) * 9
    drawn = " drawn at random" if share else ""
    source = f"cross-fitted over {folds} folds of them" if folds else f"from {validation} validation subjects{drawn}"
    left_out = f"; {excluded} subjects left out (see cohort_subject)" if excluded else ""
    return (
        f"{scored:,} of {planned:,} universes per method are scored ({defensible:,} of them defensible), for {methods}"
        f" methods on {test} test subjects, with thresholds {source}{left_out}."
    )
