//! Calls to Arrow columns.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BinaryArray, BooleanArray, Float32Builder, Float64Array, Int32Array, Int64Array, ListArray,
    ListBuilder, RecordBatch, StringArray, StringBuilder, StructArray, TimestampMicrosecondArray,
    UInt32Array, UInt32Builder, UInt64Array, new_null_array,
};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;

use super::{bits, columns};
use crate::record::{Call, CallId, JsonText, Part, Routing, RoutingShape, Sampling, Splice};

/// One row a call, all columns of [`columns::schema`].
pub(super) fn batch(calls: &[Call]) -> Result<RecordBatch, ArrowError> {
    let text = |get: fn(&Call) -> Option<&str>| -> ArrayRef {
        Arc::new(StringArray::from_iter(calls.iter().map(get)))
    };
    let id = |get: fn(&Call) -> Option<CallId>| -> ArrayRef {
        Arc::new(StringArray::from_iter(calls.iter().map(|c| get(c).map(|id| id.to_string()))))
    };
    let int =
        |get: fn(&Call) -> i32| -> ArrayRef { Arc::new(Int32Array::from_iter_values(calls.iter().map(get))) };
    let count = |get: fn(&Call) -> Option<u64>| -> ArrayRef {
        Arc::new(UInt64Array::from_iter(calls.iter().map(get)))
    };
    let flag = |get: fn(&Call) -> bool| -> ArrayRef {
        Arc::new(BooleanArray::from_iter(calls.iter().map(|c| Some(get(c)))))
    };
    let received = calls.iter().map(|c| c.received_at);
    let mut arrays: Vec<ArrayRef> = vec![
        int(|c| c.schema_version.into()),
        id(|c| Some(c.call_id)),
        int(|c| c.choice_index.into()),
        text(|c| Some(c.session_id.as_str())),
        text(|c| Some(c.trial_id.as_ref()?.as_str())),
        text(|c| Some(c.task_id.as_ref()?.as_str())),
        id(|c| c.parent_call_id),
        int(|c| c.attempt.into()),
        id(|c| c.retry_of),
        int(|c| c.rejoined.into()),
        text(|c| Some(c.kind.as_str())),
        text(|c| c.harness.as_deref()),
        text(|c| c.harness_version.as_deref()),
        text(|c| c.harness_conversation_id.as_deref()),
        int(|c| c.http_status.into()),
        text(|c| c.tokenizer_sha256.as_deref()),
        text(|c| c.template_sha256.as_deref()),
        text(|c| Some(c.client_api.as_str())),
        flag(|c| c.client_stream),
        text(|c| Some(c.upstream_kind.as_str())),
        text(|c| Some(c.upstream_api.as_str())),
        text(|c| Some(&c.model_requested)),
        text(|c| c.model_served.as_deref()),
        Arc::new(TimestampMicrosecondArray::from_iter_values(received).with_timezone("UTC")),
        count(|c| c.ttft_us),
        count(|c| Some(c.duration_us)),
        bodies(calls, |c| c.client_request.as_ref()),
        bodies(calls, |c| c.upstream_request.as_ref()),
        bodies(calls, |c| c.response.as_ref()),
        id_lists(calls, |c| c.prompt_token_ids.as_deref()),
        text(|c| Some(c.prompt_ids_source.as_str())),
        id_lists(calls, |c| c.completion_token_ids.as_deref()),
        text(|c| Some(c.completion_ids_source.as_str())),
        logprobs(calls),
        text(|c| Some(c.logprob_semantics.as_str())),
        sampling(calls, |c| &c.sampling_requested)?,
        sampling(calls, |c| &c.sampling_sent)?,
        weight_spans(calls)?,
        text(|c| Some(c.weight_source.as_str())),
        text(|c| c.text.as_deref()),
        tool_calls(calls)?,
        text(|c| c.finish_reason.as_deref()),
        usage(calls)?,
        text(|c| Some(c.status.as_str())),
        text(|c| c.error.as_deref()),
        flag(|c| c.trainable),
        text_lists(calls.iter().map(|c| Some(c.not_trainable_reasons.as_slice()))),
    ];
    arrays.extend(shared(calls)?);
    let declared = columns::declared();
    arrays.extend(declared.iter().map(|field| new_null_array(field.data_type(), calls.len())));
    arrays.extend(routing(calls));
    RecordBatch::try_new(columns::schema(), arrays)
}

/// Most of a record: room for it is made once.
fn bodies(calls: &[Call], get: fn(&Call) -> Option<&JsonText>) -> ArrayRef {
    let bytes = calls.iter().filter_map(get).map(|body| body.bytes().len()).sum();
    let mut texts = StringBuilder::with_capacity(calls.len(), bytes);
    for call in calls {
        texts.append_option(get(call).map(JsonText::get));
    }
    Arc::new(texts.finish())
}

fn element(of: DataType) -> Arc<Field> {
    Arc::new(Field::new("element", of, true))
}

fn id_lists(calls: &[Call], get: fn(&Call) -> Option<&[u32]>) -> ArrayRef {
    let mut lists = ListBuilder::new(UInt32Builder::new()).with_field(element(DataType::UInt32));
    for call in calls {
        let ids = get(call);
        lists.values().append_slice(ids.unwrap_or_default());
        lists.append(ids.is_some());
    }
    Arc::new(lists.finish())
}

fn logprobs(calls: &[Call]) -> ArrayRef {
    let mut lists = ListBuilder::new(Float32Builder::new()).with_field(element(DataType::Float32));
    for call in calls {
        let values = call.completion_logprobs.as_deref();
        for value in values.unwrap_or_default() {
            lists.values().append_option(*value);
        }
        lists.append(values.is_some());
    }
    Arc::new(lists.finish())
}

fn text_lists<'a>(rows: impl Iterator<Item = Option<&'a [String]>>) -> ArrayRef {
    let mut lists = ListBuilder::new(StringBuilder::new()).with_field(element(DataType::Utf8));
    for row in rows {
        for text in row.unwrap_or_default() {
            lists.values().append_value(text);
        }
        lists.append(row.is_some());
    }
    Arc::new(lists.finish())
}

fn sampling(calls: &[Call], get: fn(&Call) -> &Sampling) -> Result<ArrayRef, ArrowError> {
    let float = |value: fn(&Sampling) -> Option<f64>| -> ArrayRef {
        Arc::new(Float64Array::from_iter(calls.iter().map(|c| value(get(c)))))
    };
    let int = |value: fn(&Sampling) -> Option<i64>| -> ArrayRef {
        Arc::new(Int64Array::from_iter(calls.iter().map(|c| value(get(c)))))
    };
    let count = |value: fn(&Sampling) -> Option<u64>| -> ArrayRef {
        Arc::new(UInt64Array::from_iter(calls.iter().map(|c| value(get(c)))))
    };
    let arrays = vec![
        float(|s| s.temperature),
        float(|s| s.top_p),
        int(|s| s.top_k),
        float(|s| s.min_p),
        float(|s| s.repetition_penalty),
        float(|s| s.frequency_penalty),
        float(|s| s.presence_penalty),
        int(|s| s.seed),
        count(|s| s.max_tokens),
        text_lists(calls.iter().map(|c| get(c).stop.as_deref())),
        count(|s| s.n),
        Arc::new(StringArray::from_iter(calls.iter().map(|c| get(c).logit_bias.as_deref()))),
    ];
    Ok(Arc::new(StructArray::try_new(columns::sampling_fields(), arrays, None)?))
}

/// A list column over the rows' slices: the values in one struct array, offsets from the slices' lengths.
fn struct_lists<T>(
    of: DataType,
    rows: &[Option<&[T]>],
    values: impl FnOnce(&[&T]) -> Vec<ArrayRef>,
) -> Result<ArrayRef, ArrowError> {
    let flat: Vec<&T> = rows.iter().flat_map(|row| row.unwrap_or_default()).collect();
    let DataType::Struct(fields) = &of else {
        return Err(ArrowError::SchemaError("a list of structs has struct elements".to_owned()));
    };
    let structs = StructArray::try_new(fields.clone(), values(&flat), None)?;
    let offsets = OffsetBuffer::from_lengths(rows.iter().map(|row| row.map_or(0, <[T]>::len)));
    let nulls: NullBuffer = rows.iter().map(Option::is_some).collect::<Vec<_>>().into();
    Ok(Arc::new(ListArray::try_new(element(of), offsets, Arc::new(structs), Some(nulls))?))
}

fn weight_spans(calls: &[Call]) -> Result<ArrayRef, ArrowError> {
    let rows: Vec<_> = calls.iter().map(|c| c.weight_spans.as_deref()).collect();
    struct_lists(columns::span_type(), &rows, |spans| {
        vec![
            Arc::new(StringArray::from_iter_values(spans.iter().map(|s| &s.version))),
            Arc::new(UInt32Array::from_iter_values(spans.iter().map(|s| s.start))),
            Arc::new(UInt32Array::from_iter_values(spans.iter().map(|s| s.end))),
        ]
    })
}

fn tool_calls(calls: &[Call]) -> Result<ArrayRef, ArrowError> {
    let rows: Vec<_> = calls.iter().map(|c| c.tool_calls.as_deref()).collect();
    struct_lists(columns::tool_call_type(), &rows, |tools| {
        vec![
            Arc::new(StringArray::from_iter_values(tools.iter().map(|t| &t.id))),
            Arc::new(StringArray::from_iter_values(tools.iter().map(|t| &t.name))),
            Arc::new(StringArray::from_iter_values(tools.iter().map(|t| &t.arguments))),
            Arc::new(BooleanArray::from_iter(tools.iter().map(|t| Some(t.arguments_valid_json)))),
        ]
    })
}

/// What was left out.
fn shared(calls: &[Call]) -> Result<[ArrayRef; 7], ArrowError> {
    let of = || calls.iter().map(|c| c.shared.as_deref());
    let bases = || of().map(|shared| shared?.base);
    let ids = || of().map(|shared| shared?.ids);
    Ok([
        Arc::new(StringArray::from_iter(bases().map(|base| Some(base?.call_id.to_string())))),
        Arc::new(UInt32Array::from_iter(bases().map(|base| Some(base?.choice_index.into())))),
        Arc::new(UInt32Array::from_iter(ids().map(|ids| Some(ids?.count)))),
        Arc::new(UInt32Array::from_iter(ids().map(|ids| Some(ids?.crc32c)))),
        splices(&of().map(|shared| shared?.client_request.as_ref()).collect::<Vec<_>>())?,
        splices(&of().map(|shared| shared?.upstream_request.as_ref()).collect::<Vec<_>>())?,
        splices(&of().map(|shared| shared?.response.as_ref()).collect::<Vec<_>>())?,
    ])
}

fn splices(rows: &[Option<&Splice>]) -> Result<ArrayRef, ArrowError> {
    let DataType::Struct(fields) = columns::splice_type() else {
        return Err(ArrowError::SchemaError("a splice is a struct".to_owned()));
    };
    let number = |get: fn(&Splice) -> u32| -> ArrayRef {
        Arc::new(UInt32Array::from_iter(rows.iter().map(|splice| splice.map(get))))
    };
    let parts: Vec<Option<&[Part]>> = rows.iter().map(|splice| Some((*splice)?.parts.as_slice())).collect();
    let parts = struct_lists(columns::part_type(), &parts, |parts| {
        let number = |get: fn(&Part) -> u32| -> ArrayRef {
            Arc::new(UInt32Array::from_iter_values(parts.iter().map(|part| get(part))))
        };
        vec![number(|part| part.at), number(|part| part.from), number(|part| part.length)]
    })?;
    let sources = rows.iter().map(|splice| Some((*splice)?.source.as_str()));
    let sources: ArrayRef = Arc::new(StringArray::from_iter(sources));
    let arrays = vec![sources, number(|splice| splice.length), number(|splice| splice.crc32c), parts];
    let nulls: NullBuffer = rows.iter().map(Option::is_some).collect::<Vec<_>>().into();
    Ok(Arc::new(StructArray::try_new(fields, arrays, Some(nulls))?))
}

fn routing(calls: &[Call]) -> [ArrayRef; 10] {
    let number = |get: fn(&RoutingShape) -> u32| -> ArrayRef {
        let shapes = calls.iter().map(|c| c.routing.as_ref().map(|routing| get(routing.shape())));
        Arc::new(UInt32Array::from_iter(shapes))
    };
    let name = |get: fn(&RoutingShape) -> &'static str| -> ArrayRef {
        let shapes = calls.iter().map(|c| c.routing.as_ref().map(|routing| get(routing.shape())));
        Arc::new(StringArray::from_iter(shapes))
    };
    let packed: Vec<_> = calls.iter().map(|c| c.routing.as_ref().map(bits::pack)).collect();
    let data = packed.iter().map(|packed| packed.as_ref().map(|(_, data)| data));
    let bits = packed.iter().map(|packed| packed.as_ref().map(|(bits, _)| *bits));
    let bases = || calls.iter().map(|c| c.routing.as_ref().and_then(Routing::base));
    [
        Arc::new(BinaryArray::from_iter(data)),
        Arc::new(StringArray::from_iter(bases().map(|base| base.map(|base| base.call_id.to_string())))),
        Arc::new(UInt32Array::from_iter(bases().map(|base| base.map(|base| base.choice_index.into())))),
        number(|shape| shape.start),
        number(|shape| shape.rows),
        number(|shape| shape.layers),
        name(|shape| shape.layer_axis.as_str()),
        number(|shape| shape.top_k),
        name(|shape| shape.dtype.as_str()),
        Arc::new(UInt32Array::from_iter(bits)),
    ]
}

fn usage(calls: &[Call]) -> Result<ArrayRef, ArrowError> {
    let DataType::Struct(fields) = columns::usage_type() else {
        return Err(ArrowError::SchemaError("usage is a struct".to_owned()));
    };
    let count = |get: fn(&crate::record::Usage) -> Option<u64>| -> ArrayRef {
        Arc::new(UInt64Array::from_iter(calls.iter().map(|c| c.usage.as_ref().and_then(get))))
    };
    let arrays = vec![
        count(|u| Some(u.prompt_tokens)),
        count(|u| Some(u.completion_tokens)),
        count(|u| u.cached_tokens),
        count(|u| u.reasoning_tokens),
    ];
    let nulls: NullBuffer = calls.iter().map(|c| c.usage.is_some()).collect::<Vec<_>>().into();
    Ok(Arc::new(StructArray::try_new(fields, arrays, Some(nulls))?))
}
