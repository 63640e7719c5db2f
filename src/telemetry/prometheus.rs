//! The process's Prometheus registry.

use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use super::TelemetryError;
use super::catalog::{Kind, PROMETHEUS};

/// Seconds, from the time of a copy to that of a slow disk: what lego itself takes, and what passes between tokens.
const SHORT: [f64; 14] =
    [0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 5.0];

/// How often what histograms gathered is put into their buckets. Nobody may ever ask for the page.
const UPKEEP: Duration = Duration::from_secs(5);

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
    let mut builder =
        PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS);
    for metric in PROMETHEUS.iter().filter(|metric| metric.is_short) {
        let name = Matcher::Full(metric.name.to_owned());
        builder = builder.and_then(|builder| builder.set_buckets_for_metric(name, &SHORT));
    }
    let handle = builder
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
    let upkeep = handle.clone();
    // It lives as long as the process, as the recorder does.
    let tidy = move || loop {
        std::thread::sleep(UPKEEP);
        upkeep.run_upkeep();
    };
    // Without a thread to be had the page itself does it.
    drop(std::thread::Builder::new().name("lego-metrics".to_owned()).spawn(tidy));
    Ok(PrometheusPage(handle))
}
