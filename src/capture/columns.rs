//! The Parquet schema, the same in every file whatever its rows hold. `docs/captures.md` explains each column.

use std::sync::Arc;

use arrow::datatypes::DataType::{
    self, Binary, Boolean, Float32, Float64, Int32, Int64, UInt32, UInt64, Utf8,
};
use arrow::datatypes::{Field, Fields, Schema, SchemaRef, TimeUnit};

/// Key of the schema version in a file's metadata.
pub(super) const VERSION_KEY: &str = "lego.schema_version";

/// Key of the files that a merged file replaces, in its metadata: their names without the ending, between commas.
pub(super) const REPLACES_KEY: &str = "lego.replaces";
/// Key of the files that those had replaced, likewise. They are gone, or about to be.
pub(super) const REPLACED_KEY: &str = "lego.replaced";

/// Key that is there if the calls lie in the order of the columns that it names.
pub(super) const SORTED_KEY: &str = "lego.sorted";
/// What it names.
pub(super) const SORTED: &str = "session_id,received_at,call_id,choice_index";

/// Columns with bodies: large, without statistics or dictionary, and not read unless asked for.
pub(super) const BODIES: [&str; 3] = ["client_request", "upstream_request", "response"];

/// Leaves whose values hardly repeat: a dictionary would be as long as they are, and is read whole for any of its rows.
pub(super) const UNIQUE: [&str; 17] = [
    "call_id",
    "received_at",
    "ttft_us",
    "duration_us",
    "client_request",
    "upstream_request",
    "response",
    "completion_token_ids.list.element",
    "completion_logprobs.list.element",
    "text",
    "tool_calls.list.element.id",
    "tool_calls.list.element.arguments",
    "usage.prompt_tokens",
    "usage.cached_tokens",
    "base_call_id",
    "prompt_ids_crc32c",
    ROUTING,
];

/// Where what was left out is, and how much of the ids.
pub(super) const SHARED: [&str; 4] = ["base_call_id", "base_choice", "base_len", "prompt_ids_crc32c"];

/// What was left out of each body.
pub(super) const SPLICES: [&str; 3] = ["client_request_splice", "upstream_request_splice", "response_splice"];

/// The column with expert ids: large too, but a part of the tokens.
pub(super) const ROUTING: &str = "routing";

/// All columns that a call's routing is read from.
pub(super) const ROUTINGS: [&str; 10] = [
    ROUTING,
    "routing_base_call_id",
    "routing_base_choice",
    "routing_start",
    "routing_rows",
    "routing_layers",
    "routing_layer_axis",
    "routing_top_k",
    "routing_dtype",
    "routing_bits",
];

fn list(of: DataType) -> DataType {
    DataType::List(Arc::new(Field::new("element", of, true)))
}

fn record(fields: &[(&str, DataType)]) -> DataType {
    let fields = fields.iter().map(|(name, of)| Field::new(*name, of.clone(), true));
    DataType::Struct(fields.collect())
}

pub(super) fn sampling_fields() -> Fields {
    let DataType::Struct(fields) = record(&[
        ("temperature", Float64),
        ("top_p", Float64),
        ("top_k", Int64),
        ("min_p", Float64),
        ("repetition_penalty", Float64),
        ("frequency_penalty", Float64),
        ("presence_penalty", Float64),
        ("seed", Int64),
        ("max_tokens", UInt64),
        ("stop", list(Utf8)),
        ("n", UInt64),
        ("logit_bias", Utf8),
    ]) else {
        return Fields::empty();
    };
    fields
}

pub(super) fn usage_type() -> DataType {
    record(&[
        ("prompt_tokens", UInt64),
        ("completion_tokens", UInt64),
        ("cached_tokens", UInt64),
        ("reasoning_tokens", UInt64),
    ])
}

pub(super) fn span_type() -> DataType {
    record(&[("version", Utf8), ("start", UInt32), ("end", UInt32)])
}

pub(super) fn tool_call_type() -> DataType {
    record(&[("id", Utf8), ("name", Utf8), ("arguments", Utf8), ("arguments_valid_json", Boolean)])
}

pub(super) fn splice_type() -> DataType {
    record(&[("source", Utf8), ("length", UInt32), ("crc32c", UInt32), ("parts", list(part_type()))])
}

pub(super) fn part_type() -> DataType {
    record(&[("at", UInt32), ("from", UInt32), ("length", UInt32)])
}

/// The schema of every Parquet file of captures.
pub(super) fn schema() -> SchemaRef {
    let required = |name: &str, of: DataType| Field::new(name, of, false);
    let nullable = |name: &str, of: DataType| Field::new(name, of, true);
    let sampling = DataType::Struct(sampling_fields());
    let fields = vec![
        required("schema_version", Int32),
        required("call_id", Utf8),
        required("choice_index", Int32),
        required("session_id", Utf8),
        nullable("trial_id", Utf8),
        nullable("task_id", Utf8),
        nullable("parent_call_id", Utf8),
        required("attempt", Int32),
        nullable("retry_of", Utf8),
        required("rejoined", Int32),
        required("kind", Utf8),
        nullable("harness", Utf8),
        nullable("harness_version", Utf8),
        nullable("harness_conversation_id", Utf8),
        required("http_status", Int32),
        nullable("tokenizer_sha256", Utf8),
        nullable("template_sha256", Utf8),
        required("client_api", Utf8),
        required("client_stream", Boolean),
        required("upstream_kind", Utf8),
        required("upstream_api", Utf8),
        required("model_requested", Utf8),
        nullable("model_served", Utf8),
        required("received_at", DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))),
        nullable("ttft_us", UInt64),
        required("duration_us", UInt64),
        nullable("client_request", Utf8),
        nullable("upstream_request", Utf8),
        nullable("response", Utf8),
        nullable("prompt_token_ids", list(UInt32)),
        required("prompt_ids_source", Utf8),
        nullable("completion_token_ids", list(UInt32)),
        required("completion_ids_source", Utf8),
        nullable("completion_logprobs", list(Float32)),
        required("logprob_semantics", Utf8),
        nullable("sampling_requested", sampling.clone()),
        nullable("sampling_sent", sampling),
        nullable("weight_spans", list(span_type())),
        required("weight_source", Utf8),
        nullable("text", Utf8),
        nullable("tool_calls", list(tool_call_type())),
        nullable("finish_reason", Utf8),
        nullable("usage", usage_type()),
        required("status", Utf8),
        nullable("error", Utf8),
        required("trainable", Boolean),
        nullable("not_trainable_reasons", list(Utf8)),
        nullable("base_call_id", Utf8),
        nullable("base_choice", UInt32),
        nullable("base_len", UInt32),
        nullable("prompt_ids_crc32c", UInt32),
    ];
    let splices = SPLICES.map(|name| nullable(name, splice_type()));
    let fields = fields.into_iter().chain(splices).chain(declared()).chain(routing());
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// Columns that nothing fills yet: null, with the type they will have.
pub(super) fn declared() -> Vec<Field> {
    let top_logprobs = record(&[
        ("k", Int32),
        ("ids", list(UInt32)),
        ("logprobs", list(Float32)),
        ("offsets", list(UInt32)),
    ]);
    let sampling_mask = record(&[("ids", list(UInt32)), ("offsets", list(UInt32))]);
    [("top_logprobs", top_logprobs), ("prompt_logprobs", list(Float32)), ("sampling_mask", sampling_mask)]
        .into_iter()
        .map(|(name, of)| Field::new(name, of, true))
        .collect()
}

/// Expert routing: all null, or none.
fn routing() -> Vec<Field> {
    [
        (ROUTING, Binary),
        ("routing_base_call_id", Utf8),
        ("routing_base_choice", UInt32),
        ("routing_start", UInt32),
        ("routing_rows", UInt32),
        ("routing_layers", UInt32),
        ("routing_layer_axis", Utf8),
        ("routing_top_k", UInt32),
        ("routing_dtype", Utf8),
        ("routing_bits", UInt32),
    ]
    .into_iter()
    .map(|(name, of)| Field::new(name, of, true))
    .collect()
}
