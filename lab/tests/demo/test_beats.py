"""A run that missed its beats is told from one that kept time."""

from __future__ import annotations

from lab.demo.beats import Beats, counted, late, rule_evaluations

# As Prometheus 2.42 publishes them; iterations_total counts those that were missed too.
METRICS = """\
# TYPE prometheus_rule_group_iterations_missed_total counter
prometheus_rule_group_iterations_missed_total{rule_group="/tmp/demo/rules.yaml;kvpressure-harm-calm"} 16
prometheus_rule_group_iterations_missed_total{rule_group="/tmp/demo/rules.yaml;kvpressure-recordings-calm"} 50
# TYPE prometheus_rule_group_iterations_total counter
prometheus_rule_group_iterations_total{rule_group="/tmp/demo/rules.yaml;kvpressure-harm-calm"} 79
prometheus_rule_group_iterations_total{rule_group="/tmp/demo/rules.yaml;kvpressure-recordings-calm"} 74
prometheus_rule_group_last_duration_seconds{rule_group="/tmp/demo/rules.yaml;kvpressure-harm-calm"} 0.18
"""


def test_the_rule_group_that_missed_most_speaks_for_all() -> None:
    worst = rule_evaluations(METRICS)
    assert worst == Beats("rule evaluations", 74, 50)
    assert str(worst) == "50 of 74 rule evaluations missed"


def test_without_rule_groups_nothing_was_due() -> None:
    assert rule_evaluations("up 1\n").share == 0


def test_what_came_too_often_was_not_missed() -> None:
    assert counted("scrapes", 72, 73) == Beats("scrapes", 72, 0)
    assert counted("scrapes", 72, 31) == Beats("scrapes", 72, 41)


def test_a_beat_now_and_then_may_be_missed_and_more_than_one_of_twenty_may_not() -> None:
    kept, behind = Beats("ticks", 100, 5), Beats("ticks", 100, 6)
    assert late([kept, behind]) == [behind]
