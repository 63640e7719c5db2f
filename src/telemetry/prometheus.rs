//! The process's Prometheus registry.

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use super::TelemetryError;
use super::catalog::{Kind, PROMETHEUS};

/// Seconds, from a token's time to a long generation's.
const SECONDS: [f64; 12] = [0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0];

/// Renders what `/metrics` answers.
#[derive(Clone)]
pub struct PrometheusPage(PrometheusHandle);

impl PrometheusPage {
    /// The text exposition format.
    #[must_use]
    pub fn render(&self) -> String {
        self.0.run_upkeep();
        self.0.render()
    }
}

/// Installs the process's recorder: `metrics::counter!` and its like count from here on.
///
/// # Errors
/// [`TelemetryError::AlreadyInstalled`] on a second call.
pub fn install_prometheus() -> Result<PrometheusPage, TelemetryError> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)
        .and_then(PrometheusBuilder::install_recorder)
        .map_err(|_| TelemetryError::AlreadyInstalled("a metrics recorder"))?;
    for metric in PROMETHEUS {
        match metric.kind {
            Kind::Counter => metrics::describe_counter!(metric.name, metric.description),
            Kind::Gauge => metrics::describe_gauge!(metric.name, metric.description),
            Kind::Histogram => metrics::describe_histogram!(metric.name, metric.description),
            Kind::Float | Kind::Integer => {}
        }
    }
    Ok(PrometheusPage(handle))
}
