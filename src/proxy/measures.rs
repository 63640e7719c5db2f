//! What the proxy counts and times, for `/metrics`.
//!
//! Handles are found once, when the proxy is made: by name each is a look-up under a lock, and tokens have no time for
//! that. So the process's recorder is installed before. Labels are words of lego's own; none is a client's.

use std::collections::HashMap;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use super::rows::RowCounts;
use super::{token_in, verdict};
use crate::record::{Call, CallStatus};

/// The proxy's metrics.
pub(super) struct Measures {
    calls: HashMap<CallStatus, Counter>,
    records: HashMap<CallStatus, Counter>,
    reasons: HashMap<String, Counter>,
    other_reason: Counter,
    pub(super) captured_tokens: Counter,
    pub(super) routing_rows: RowCounts,
    pub(super) capture_failures: Counter,
    pub(super) retries: Counter,
    pub(super) in_flight: Gauge,
    without_place: Gauge,
    open_streams: Gauge,
    buffered_bytes: Gauge,
    call_seconds: Histogram,
    /// Receipt to the first event of the upstream's stream.
    pub(super) ttft: Histogram,
    /// Between an event of the upstream's stream and the next.
    pub(super) inter_token: Histogram,
    /// Receipt to the first sending upstream.
    pub(super) added_to_request: Histogram,
    /// A piece's receipt from the upstream to its way to the client.
    pub(super) added_to_reply: Histogram,
    /// A call's end to its records being durable.
    pub(super) capture_lag: Histogram,
}

impl Default for Measures {
    fn default() -> Self {
        gauge!("lego_proxy_paused").set(0.0);
        let waiting = |reason: &'static str| {
            let gauge = gauge!("lego_proxy_calls_waiting", "reason" => reason);
            gauge.increment(0.0);
            gauge
        };
        drop(waiting("pause"));
        token_in::outcomes().for_each(token_in::none_yet);
        let added = |side: &'static str| histogram!("lego_proxy_added_seconds", "side" => side);
        let by_status = |name: &'static str| {
            let of = |status: &CallStatus| (*status, counter!(name, "status" => status.as_str()));
            CallStatus::ALL.iter().map(of).collect()
        };
        let of_reason = |reason: String| counter!("lego_proxy_not_trainable_total", "reason" => reason);
        Self {
            calls: by_status("lego_proxy_calls_total"),
            records: by_status("lego_proxy_records_total"),
            reasons: verdict::all_reasons().map(|reason| (reason.clone(), of_reason(reason))).collect(),
            other_reason: of_reason("other".to_owned()),
            captured_tokens: counter!("lego_proxy_captured_tokens_total"),
            routing_rows: RowCounts::default(),
            capture_failures: counter!("lego_proxy_capture_failures_total"),
            retries: counter!("lego_proxy_retries_total"),
            in_flight: gauge!("lego_proxy_calls_in_flight"),
            without_place: waiting("place"),
            open_streams: gauge!("lego_proxy_open_streams"),
            buffered_bytes: Buffered::default().gauge.clone(),
            call_seconds: histogram!("lego_proxy_call_seconds"),
            ttft: histogram!("lego_proxy_ttft_seconds"),
            inter_token: histogram!("lego_proxy_inter_token_seconds"),
            added_to_request: added("request"),
            added_to_reply: added("reply"),
            capture_lag: histogram!("lego_capture_lag_seconds"),
        }
    }
}

/// What is counted of a record, which itself goes to the store.
pub(super) struct Recorded {
    status: CallStatus,
    not_trainable_reasons: Vec<String>,
    tokens: u64,
}

impl Recorded {
    pub(super) fn of(call: &Call) -> Self {
        let tokens = call.sampled_ids().map_or(0, <[u32]>::len);
        Self {
            status: call.status,
            not_trainable_reasons: call.not_trainable_reasons.clone(),
            tokens: u64::try_from(tokens).unwrap_or(u64::MAX),
        }
    }
}

impl Measures {
    /// A call ended after this time.
    pub(super) fn ended(&self, status: CallStatus, after: Duration) {
        self.in_flight.decrement(1.0);
        if let Some(calls) = self.calls.get(&status) {
            calls.increment(1);
        }
        self.call_seconds.record(after);
    }

    /// A call waits for a place or a turn, until this is dropped.
    pub(super) fn without_place(&self) -> WithoutPlace {
        self.without_place.increment(1.0);
        WithoutPlace(self.without_place.clone())
    }

    /// A record became durable.
    pub(super) fn recorded(&self, call: &Recorded) {
        if let Some(records) = self.records.get(&call.status) {
            records.increment(1);
        }
        for reason in &call.not_trainable_reasons {
            self.reasons.get(reason).unwrap_or(&self.other_reason).increment(1);
        }
        self.captured_tokens.increment(call.tokens);
    }

    /// A client's stream began. It is over when this is dropped.
    pub(super) fn stream(&self) -> OpenStream {
        self.open_streams.increment(1.0);
        let buffered = Buffered { gauge: self.buffered_bytes.clone(), bytes: 0 };
        OpenStream { open: self.open_streams.clone(), buffered }
    }
}

/// A call that waits for a place or a turn, in the gauge.
pub(super) struct WithoutPlace(Gauge);

impl Drop for WithoutPlace {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}

/// A stream that a client reads, in the gauges.
pub(super) struct OpenStream {
    open: Gauge,
    /// What is held of it.
    pub(super) buffered: Buffered,
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.open.decrement(1.0);
    }
}

/// Bytes of one reply that are held in memory, in the gauge until this is dropped.
pub(super) struct Buffered {
    gauge: Gauge,
    bytes: usize,
}

impl Default for Buffered {
    fn default() -> Self {
        Self { gauge: gauge!("lego_proxy_buffered_bytes"), bytes: 0 }
    }
}

impl Buffered {
    /// So many they are now.
    pub(super) fn set(&mut self, bytes: usize) {
        if bytes != self.bytes {
            self.gauge.increment(bytes as f64 - self.bytes as f64);
            self.bytes = bytes;
        }
    }
}

impl Drop for Buffered {
    fn drop(&mut self) {
        self.set(0);
    }
}
