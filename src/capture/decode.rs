//! Arrow columns to calls. A column that an older file lacks, or that was not asked for, is null.

use std::str::FromStr;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BooleanArray, ListArray, RecordBatch, StringArray, StructArray,
    UInt32Array, UInt64Array,
};
use arrow::datatypes::{
    Float32Type, Float64Type, Int32Type, Int64Type, TimestampMicrosecondType, UInt32Type, UInt64Type,
};
use bytes::Bytes;

use super::{bits, columns};
use crate::record::{
    Call, CallId, CallKind, CallStatus, CapturedToolCall, ChoiceId, ClientApi, IdsSource, JsonText,
    LayerAxis, LogprobSemantics, Part, Routing, RoutingDtype, RoutingShape, Sampling, Shared, SharedIds,
    Splice, SpliceSource, UpstreamKind, Usage, WeightSource, WeightSpan,
};

type Decoded<T> = Result<T, String>;

/// All calls of a batch, in order; the error names the column.
pub(super) fn calls(batch: &RecordBatch) -> Decoded<Vec<Call>> {
    (0..batch.num_rows()).map(|row| call(Row { batch, row })).collect()
}

/// The call of one row; the error names the column.
pub(super) fn call_at(batch: &RecordBatch, row: usize) -> Decoded<Call> {
    call(Row { batch, row })
}

/// Which call a row is of, as far as that can be read.
pub(super) fn call_id_at(batch: &RecordBatch, row: usize) -> Option<CallId> {
    Row { batch, row }.parsed("call_id").ok().flatten()
}

/// One row of named columns.
#[derive(Clone, Copy)]
struct Row<'a> {
    batch: &'a RecordBatch,
    row: usize,
}

fn call(row: Row<'_>) -> Decoded<Call> {
    Ok(Call {
        schema_version: row.small("schema_version")?,
        call_id: row.needed("call_id", row.parsed("call_id")?)?,
        choice_index: row.small("choice_index")?,
        session_id: row.needed("session_id", row.parsed("session_id")?)?,
        trial_id: row.parsed("trial_id")?,
        task_id: row.parsed("task_id")?,
        parent_call_id: row.parsed("parent_call_id")?,
        attempt: row.small("attempt")?,
        retry_of: row.parsed("retry_of")?,
        rejoined: row.rejoined()?,
        kind: row.named("kind", CallKind::from_name)?,
        harness: row.text("harness")?,
        harness_version: row.text("harness_version")?,
        harness_conversation_id: row.text("harness_conversation_id")?,
        http_status: row.small("http_status")?,
        tokenizer_sha256: row.text("tokenizer_sha256")?,
        template_sha256: row.text("template_sha256")?,
        client_api: row.named("client_api", ClientApi::from_name)?,
        client_stream: row.flag("client_stream")?,
        upstream_kind: row.named("upstream_kind", UpstreamKind::from_name)?,
        upstream_api: row.named("upstream_api", ClientApi::from_name)?,
        model_requested: row.needed("model_requested", row.text("model_requested")?)?,
        model_served: row.text("model_served")?,
        received_at: row.received_at()?,
        ttft_us: row.count("ttft_us")?,
        duration_us: row.needed("duration_us", row.count("duration_us")?)?,
        client_request: row.json("client_request")?,
        upstream_request: row.json("upstream_request")?,
        response: row.json("response")?,
        prompt_token_ids: row.ids("prompt_token_ids")?,
        prompt_ids_source: row.named("prompt_ids_source", IdsSource::from_name)?,
        completion_token_ids: row.ids("completion_token_ids")?,
        completion_ids_source: row.named("completion_ids_source", IdsSource::from_name)?,
        completion_logprobs: row.logprobs("completion_logprobs")?,
        logprob_semantics: row.named("logprob_semantics", LogprobSemantics::from_name)?,
        sampling_requested: row.sampling("sampling_requested")?,
        sampling_sent: row.sampling("sampling_sent")?,
        weight_spans: row.weight_spans()?,
        weight_source: row.named("weight_source", WeightSource::from_name)?,
        routing: row.routing()?,
        text: row.text("text")?,
        tool_calls: row.tool_calls()?,
        finish_reason: row.text("finish_reason")?,
        usage: row.usage()?,
        status: row.named("status", CallStatus::from_name)?,
        error: row.text("error")?,
        trainable: row.flag("trainable")?,
        not_trainable_reasons: row.texts("not_trainable_reasons")?.unwrap_or_default(),
        shared: row.shared()?,
    })
}

impl<'a> Row<'a> {
    /// The column, unless it is missing or null in this row.
    fn cell<T: Array + 'static>(self, name: &str) -> Decoded<Option<&'a T>> {
        let Some(column) = self.batch.column_by_name(name) else {
            return Ok(None);
        };
        if column.is_null(self.row) {
            return Ok(None);
        }
        let found = column.data_type();
        let column = column.as_any().downcast_ref();
        column.map(Some).ok_or_else(|| format!("column {name} has the type {found}"))
    }

    fn needed<T>(self, name: &str, value: Option<T>) -> Decoded<T> {
        value.ok_or_else(|| format!("column {name} is null in row {}", self.row))
    }

    fn str(self, name: &str) -> Decoded<Option<&'a str>> {
        Ok(self.cell::<StringArray>(name)?.map(|column| column.value(self.row)))
    }

    fn text(self, name: &str) -> Decoded<Option<String>> {
        Ok(self.str(name)?.map(str::to_owned))
    }

    fn json(self, name: &str) -> Decoded<Option<JsonText>> {
        Ok(self.str(name)?.map(JsonText::of_read))
    }

    fn parsed<T: FromStr<Err: std::fmt::Display>>(self, name: &str) -> Decoded<Option<T>> {
        let parsed = self.str(name)?.map(str::parse).transpose();
        parsed.map_err(|error: T::Err| format!("column {name}: {error}"))
    }

    fn named<T>(self, name: &str, from_name: fn(&str) -> Option<T>) -> Decoded<T> {
        let text = self.needed(name, self.str(name)?)?;
        from_name(text).ok_or_else(|| format!("column {name} holds {text:?}, which is not known"))
    }

    fn flag(self, name: &str) -> Decoded<bool> {
        let column = self.cell::<BooleanArray>(name)?;
        self.needed(name, column.map(|column| column.value(self.row)))
    }

    fn small(self, name: &str) -> Decoded<u16> {
        let column = self.cell::<arrow::array::PrimitiveArray<Int32Type>>(name)?;
        let value = self.needed(name, column.map(|column| column.value(self.row)))?;
        value.try_into().map_err(|_| format!("column {name} holds {value}"))
    }

    /// Files from before the column are from before anything was rejoined.
    fn rejoined(self) -> Decoded<u16> {
        match self.batch.column_by_name("rejoined") {
            Some(_) => self.small("rejoined"),
            None => Ok(0),
        }
    }

    fn count(self, name: &str) -> Decoded<Option<u64>> {
        Ok(self.cell::<UInt64Array>(name)?.map(|column| column.value(self.row)))
    }

    fn received_at(self) -> Decoded<i64> {
        type Times = arrow::array::PrimitiveArray<TimestampMicrosecondType>;
        let column = self.cell::<Times>("received_at")?;
        self.needed("received_at", column.map(|column| column.value(self.row)))
    }

    fn list(self, name: &str) -> Decoded<Option<ArrayRef>> {
        Ok(self.cell::<ListArray>(name)?.map(|column| column.value(self.row)))
    }

    fn ids(self, name: &str) -> Decoded<Option<Vec<u32>>> {
        let Some(list) = self.list(name)? else {
            return Ok(None);
        };
        let ids = list.as_primitive_opt::<UInt32Type>().filter(|ids| ids.null_count() == 0);
        let ids = ids.ok_or_else(|| format!("column {name} is not a list of token ids"))?;
        Ok(Some(ids.values().to_vec()))
    }

    fn logprobs(self, name: &str) -> Decoded<Option<Vec<Option<f32>>>> {
        let Some(list) = self.list(name)? else {
            return Ok(None);
        };
        let values = list.as_primitive_opt::<Float32Type>();
        let values = values.ok_or_else(|| format!("column {name} is not a list of log-probs"))?;
        Ok(Some(values.iter().collect()))
    }

    fn texts(self, name: &str) -> Decoded<Option<Vec<String>>> {
        self.list(name)?.map(|list| texts(&list, name)).transpose()
    }

    fn sampling(self, name: &str) -> Decoded<Sampling> {
        let Some(column) = self.cell::<StructArray>(name)? else {
            return Ok(Sampling::default());
        };
        let fields = Fields { of: column, row: self.row };
        Ok(Sampling {
            temperature: fields.float("temperature"),
            top_p: fields.float("top_p"),
            top_k: fields.int("top_k"),
            min_p: fields.float("min_p"),
            repetition_penalty: fields.float("repetition_penalty"),
            frequency_penalty: fields.float("frequency_penalty"),
            presence_penalty: fields.float("presence_penalty"),
            seed: fields.int("seed"),
            max_tokens: fields.count("max_tokens"),
            stop: match fields.present("stop").and_then(|stop| stop.as_list_opt::<i32>()) {
                Some(stop) => Some(texts(&stop.value(self.row), name)?),
                None => None,
            },
            n: fields.count("n"),
            logit_bias: fields.text("logit_bias"),
        })
    }

    fn usage(self) -> Decoded<Option<Usage>> {
        let Some(column) = self.cell::<StructArray>("usage")? else {
            return Ok(None);
        };
        let fields = Fields { of: column, row: self.row };
        Ok(Some(Usage {
            prompt_tokens: self.needed("usage", fields.count("prompt_tokens"))?,
            completion_tokens: self.needed("usage", fields.count("completion_tokens"))?,
            cached_tokens: fields.count("cached_tokens"),
            reasoning_tokens: fields.count("reasoning_tokens"),
        }))
    }

    fn number(self, name: &str) -> Decoded<u32> {
        let column = self.cell::<UInt32Array>(name)?;
        self.needed(name, column.map(|column| column.value(self.row)))
    }

    fn routing(self) -> Decoded<Option<Routing>> {
        let Some(column) = self.cell::<BinaryArray>(columns::ROUTING)? else {
            return Ok(None);
        };
        let shape = RoutingShape {
            start: self.number("routing_start")?,
            rows: self.number("routing_rows")?,
            layers: self.number("routing_layers")?,
            layer_axis: self.named("routing_layer_axis", LayerAxis::from_name)?,
            top_k: self.number("routing_top_k")?,
            dtype: self.named("routing_dtype", RoutingDtype::from_name)?,
        };
        let data = column.value(self.row);
        // In files from before ids were packed they are as their type has them.
        let data = match self.cell::<UInt32Array>("routing_bits")?.map(|column| column.value(self.row)) {
            None => Ok(Bytes::copy_from_slice(data)),
            Some(bits) => bits::unpack(shape, bits, data),
        };
        let data = data.map_err(|error| format!("column routing: {error}"))?;
        let routing = Routing::new(shape, data).map_err(|error| format!("column routing: {error}"))?;
        Ok(Some(routing.based_on(self.choice("routing_base_call_id", "routing_base_choice")?)))
    }

    /// Null as well in files from before there was the column.
    fn choice(self, call: &str, choice: &str) -> Decoded<Option<ChoiceId>> {
        let id = self.parsed::<CallId>(call)?;
        let choice_id = |call_id| {
            let number = self.number(choice)?;
            let choice_index = number.try_into().map_err(|_| format!("column {choice} holds {number}"))?;
            Ok(ChoiceId { call_id, choice_index })
        };
        id.map(choice_id).transpose()
    }

    fn shared(self) -> Decoded<Option<Box<Shared>>> {
        let ids = self.cell::<UInt32Array>("base_len")?.map(|column| column.value(self.row));
        let ids = ids.map(|count| Ok(SharedIds { count, crc32c: self.number("prompt_ids_crc32c")? }));
        let [client_request, upstream_request, response] = columns::SPLICES.map(|name| self.splice(name));
        let shared = Shared {
            base: self.choice("base_call_id", "base_choice")?,
            ids: ids.transpose().map_err(|error: String| error)?,
            client_request: client_request?,
            upstream_request: upstream_request?,
            response: response?,
        };
        Ok((shared != Shared::default()).then(|| Box::new(shared)))
    }

    fn splice(self, name: &str) -> Decoded<Option<Splice>> {
        let Some(column) = self.cell::<StructArray>(name)? else {
            return Ok(None);
        };
        let fields = Fields { of: column, row: self.row };
        let parts = fields.present("parts").and_then(|parts| parts.as_list_opt::<i32>());
        let parts = parts.map(|parts| parts.value(self.row));
        let parts = parts.as_ref().and_then(|parts| parts.as_struct_opt()).and_then(|of| {
            let part = |row| {
                let fields = Fields { of, row };
                Some(Part { at: fields.id("at")?, from: fields.id("from")?, length: fields.id("length")? })
            };
            (0..of.len()).map(part).collect::<Option<Vec<_>>>()
        });
        let source = fields.text("source").and_then(|source| SpliceSource::from_name(&source));
        let splice = source.zip(parts).and_then(|(source, parts)| {
            Some(Splice { source, length: fields.id("length")?, crc32c: fields.id("crc32c")?, parts })
        });
        self.needed(name, splice).map(Some)
    }

    fn weight_spans(self) -> Decoded<Option<Vec<WeightSpan>>> {
        self.structs("weight_spans", |fields| {
            Some(WeightSpan {
                version: fields.text("version")?,
                start: fields.id("start")?,
                end: fields.id("end")?,
            })
        })
    }

    fn tool_calls(self) -> Decoded<Option<Vec<CapturedToolCall>>> {
        self.structs("tool_calls", |fields| {
            Some(CapturedToolCall {
                id: fields.text("id")?,
                name: fields.text("name")?,
                arguments: fields.text("arguments")?,
                arguments_valid_json: fields.flag("arguments_valid_json")?,
            })
        })
    }

    fn structs<T>(self, name: &str, build: impl Fn(Fields<'_>) -> Option<T>) -> Decoded<Option<Vec<T>>> {
        let Some(list) = self.list(name)? else {
            return Ok(None);
        };
        let of = list.as_struct_opt().ok_or_else(|| format!("column {name} has no structs"))?;
        let values: Option<Vec<T>> = (0..of.len()).map(|row| build(Fields { of, row })).collect();
        self.needed(name, values).map(Some)
    }
}

fn texts(list: &ArrayRef, name: &str) -> Decoded<Vec<String>> {
    let texts = list.as_string_opt::<i32>();
    let texts = texts.ok_or_else(|| format!("column {name} is not a list of texts"))?;
    Ok(texts.iter().flatten().map(str::to_owned).collect())
}

/// One row of a struct column.
#[derive(Clone, Copy)]
struct Fields<'a> {
    of: &'a StructArray,
    row: usize,
}

impl<'a> Fields<'a> {
    fn present(self, name: &str) -> Option<&'a ArrayRef> {
        self.of.column_by_name(name).filter(|column| column.is_valid(self.row))
    }

    fn text(self, name: &str) -> Option<String> {
        let column = self.present(name)?.as_string_opt::<i32>()?;
        Some(column.value(self.row).to_owned())
    }

    fn flag(self, name: &str) -> Option<bool> {
        Some(self.present(name)?.as_boolean_opt()?.value(self.row))
    }

    fn float(self, name: &str) -> Option<f64> {
        Some(self.present(name)?.as_primitive_opt::<Float64Type>()?.value(self.row))
    }

    fn int(self, name: &str) -> Option<i64> {
        Some(self.present(name)?.as_primitive_opt::<Int64Type>()?.value(self.row))
    }

    fn id(self, name: &str) -> Option<u32> {
        Some(self.present(name)?.as_primitive_opt::<UInt32Type>()?.value(self.row))
    }

    fn count(self, name: &str) -> Option<u64> {
        Some(self.present(name)?.as_primitive_opt::<UInt64Type>()?.value(self.row))
    }
}
