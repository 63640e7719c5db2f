//! (room `telemetry`; see the crate docs)
