//! Families of samples that are put together by hand, where the registry's own types would not agree with each other.

use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};

pub(super) fn labels(pairs: &[(&str, &str)]) -> Vec<LabelPair> {
    pairs
        .iter()
        .map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value((*value).to_owned());
            pair
        })
        .collect()
}

pub(super) fn counter(value: u64, pairs: &[(&str, &str)]) -> Metric {
    let mut counter = Counter::default();
    counter.set_value(value as f64);
    let mut metric = Metric::from_label(labels(pairs));
    metric.set_counter(counter);
    metric
}

pub(super) fn gauge(value: f64, pairs: &[(&str, &str)]) -> Metric {
    let mut gauge = Gauge::default();
    gauge.set_value(value);
    let mut metric = Metric::from_label(labels(pairs));
    metric.set_gauge(gauge);
    metric
}

pub(super) fn family(
    name: &str,
    help: &str,
    ty: MetricType,
    metrics: impl IntoIterator<Item = Metric>,
) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(ty);
    family.set_metric(metrics.into_iter().collect());
    family
}

/// `own` under another name and with other labels.
pub(super) fn renamed(own: &MetricFamily, name: &str, pairs: &[(&str, &str)]) -> MetricFamily {
    let mut family = own.clone();
    family.set_name(name.to_owned());
    for metric in family.mut_metric() {
        metric.set_label(labels(pairs));
    }
    family
}
