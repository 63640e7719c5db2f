//! Calls made up for tests.

use lego::record::{
    Call, CallId, CallKind, CallStatus, CapturedToolCall, ClientApi, IdsSource, JsonText, LayerAxis,
    LogprobSemantics, Routing, RoutingDtype, RoutingShape, SCHEMA_VERSION, Sampling, UpstreamKind, Usage,
    WeightSource, WeightSpan,
};

/// A complete, trainable policy call of `session` with these ids.
pub fn call(session: &str, prompt: &[u32], completion: &[u32]) -> Call {
    let sampling = Sampling { temperature: Some(1.0), top_p: Some(1.0), ..Sampling::default() };
    let logprobs = completion.iter().map(|&id| Some(-(id as f32 + 1.0) / 7.0));
    let json = |text: &str| JsonText::new(text).ok();
    Call {
        schema_version: SCHEMA_VERSION,
        call_id: CallId::now(),
        choice_index: 0,
        session_id: session.parse().expect("usable id"),
        trial_id: format!("trial-of-{session}").parse().ok(),
        task_id: "task-1".parse().ok(),
        parent_call_id: None,
        attempt: 1,
        retry_of: None,
        rejoined: 0,
        kind: CallKind::Policy,
        harness: Some("mini".to_owned()),
        harness_version: None,
        harness_conversation_id: None,
        http_status: 200,
        tokenizer_sha256: None,
        template_sha256: None,
        client_api: ClientApi::OpenaiChat,
        client_stream: true,
        upstream_kind: UpstreamKind::Embedded,
        upstream_api: ClientApi::OpenaiChat,
        model_requested: "lego-tiny".to_owned(),
        model_served: Some("lego-tiny".to_owned()),
        received_at: 1_795_946_400_123_456,
        ttft_us: Some(1500),
        duration_us: 20_000,
        client_request: json(r#"{"messages": [ {"role":"user","content":"héllo \ud83d\ude00"} ], "x": 1.0}"#),
        upstream_request: None,
        response: json(r#"[{"choices":[]}]"#),
        prompt_token_ids: Some(prompt.to_vec()),
        prompt_ids_source: IdsSource::Engine,
        completion_token_ids: Some(completion.to_vec()),
        completion_ids_source: IdsSource::Engine,
        completion_logprobs: Some(logprobs.collect()),
        logprob_semantics: LogprobSemantics::RawT1,
        sampling_requested: Sampling::default(),
        sampling_sent: sampling,
        weight_spans: Some(vec![WeightSpan {
            version: "3".to_owned(),
            start: 0,
            end: completion.len() as u32,
        }]),
        weight_source: WeightSource::ReplySpans,
        routing: None,
        text: Some("hi".to_owned()),
        tool_calls: Some(vec![CapturedToolCall {
            id: "call_1".to_owned(),
            name: "edit".to_owned(),
            arguments: r#"{"a": 1,"b":2}"#.to_owned(),
            arguments_valid_json: true,
        }]),
        finish_reason: Some("stop".to_owned()),
        usage: Some(Usage {
            prompt_tokens: prompt.len() as u64,
            completion_tokens: completion.len() as u64,
            cached_tokens: Some(0),
            reasoning_tokens: None,
        }),
        status: CallStatus::Ok,
        error: None,
        trainable: true,
        not_trainable_reasons: vec![],
        shared: None,
    }
}

#[allow(dead_code, reason = "not every test binary needs one")]
/// Expert ids counted from 0, packed by the smallest type: two layers, two experts a token.
pub fn routing(start: u32, rows: u32, first: u32) -> Routing {
    let shape = RoutingShape {
        start,
        rows,
        layers: 2,
        layer_axis: LayerAxis::AllHidden,
        top_k: 2,
        dtype: RoutingDtype::U8,
    };
    let ids: Vec<u32> = (first..first + rows * 4).collect();
    Routing::pack(shape, &ids).expect("four ids a row")
}

#[allow(dead_code, reason = "not every test binary needs one")]
/// A call that failed before anything was sampled: all that can be null is.
pub fn failed_call(session: &str) -> Call {
    Call {
        trial_id: None,
        task_id: None,
        harness: None,
        http_status: 502,
        model_served: None,
        ttft_us: None,
        client_request: None,
        response: None,
        prompt_token_ids: None,
        prompt_ids_source: IdsSource::Absent,
        completion_token_ids: None,
        completion_ids_source: IdsSource::Absent,
        completion_logprobs: None,
        logprob_semantics: LogprobSemantics::Unknown,
        sampling_sent: Sampling::default(),
        weight_spans: None,
        weight_source: WeightSource::Unknown,
        text: None,
        tool_calls: None,
        finish_reason: None,
        usage: None,
        status: CallStatus::UpstreamError,
        error: Some("connection refused".to_owned()),
        trainable: false,
        not_trainable_reasons: vec!["upstream_error".to_owned()],
        ..call(session, &[], &[])
    }
}

#[allow(dead_code, reason = "not every test binary compares calls")]
/// The call as JSON, for comparison: `Call` holds raw JSON and has no equality of its own.
pub fn as_json(call: &Call) -> String {
    serde_json::to_string(call).expect("calls serialise")
}
