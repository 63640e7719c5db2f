use super::*;

const WANTED: Wanted = Wanted { token_ids: true, logprobs: true };
const PINNED: SamplingPlan = SamplingPlan::Pinned { temperature: 1.0, seed: 9 };

fn request(text: &'static str) -> Request {
    Request::parse(Bytes::from_static(text.as_bytes())).expect("request")
}

#[test]
fn a_training_session_sends_its_own_sampling_in_full() {
    let request = request(
        r#"{"model":"m","messages":[],"temperature":0.2,"logit_bias":{"5":-100},"top_k":20,"min_tokens":4,"stop":"x"}"#,
    );
    let sent = prepare(UpstreamKind::Vllm, WANTED, PINNED, &request, Some("policy")).expect("object");
    let body: Value = serde_json::from_slice(&sent.body).expect("JSON");
    assert_eq!(body["model"], "policy");
    assert_eq!(body["temperature"], 1.0);
    assert_eq!(body["top_k"], -1);
    assert!(body.get("logit_bias").is_none() && body.get("min_tokens").is_none());
    assert_eq!(body["stop"], "x");
    assert_eq!(sent.logprob_semantics, LogprobSemantics::RawT1);
    assert_eq!(sent.sampling_requested.temperature, Some(0.2));
    assert_eq!(sent.sampling_requested.logit_bias.as_deref(), Some(r#"{"5":-100}"#));
    assert_eq!(sent.sampling_sent.seed, Some(9));
    assert_eq!(sent.sampling_sent.logit_bias, None);
    assert!(is_untruncated(&sent.sampling_sent));
    assert_eq!(sent.cut.model.as_deref(), Some("m"));
}

#[test]
fn a_call_to_which_nothing_is_added_is_sent_as_it_came() {
    let request = request(
        r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true},"logprobs":true,"return_token_ids":true,"return_weight_versions":true}"#,
    );
    let plan = SamplingPlan::PassThrough;
    let sent = prepare(UpstreamKind::Vllm, WANTED, plan, &request, None).expect("object");
    assert_eq!(sent.body, request.body());
    assert!(sent.cut.is_nothing());
    assert_eq!(sent.sampling_sent, Sampling::default());
    assert_eq!(sent.logprob_semantics, LogprobSemantics::Unknown);
}

#[test]
fn a06_usage_is_asked_for_whatever_the_client_said_short_of_true() {
    for (options, asks) in [
        ("", false),
        (r#","stream_options":null"#, false),
        (r#","stream_options":{}"#, false),
        (r#","stream_options":{"include_usage":false,"x":1}"#, false),
        (r#","stream_options":{"include_usage":true}"#, true),
    ] {
        let text = format!(r#"{{"model":"m","messages":[],"stream":true{options}}}"#);
        let request = Request::parse(Bytes::from(text)).expect("request");
        let sent =
            prepare(UpstreamKind::Openai, WANTED, SamplingPlan::PassThrough, &request, None).expect("object");
        let body: Value = serde_json::from_slice(&sent.body).expect("JSON");
        assert_eq!(body["stream_options"]["include_usage"], true, "{options}");
        assert_eq!(sent.cut.usage, !asks, "{options}");
    }
}

#[test]
fn a_plain_gateway_is_asked_for_no_ids() {
    let request = request(r#"{"model":"m","messages":[]}"#);
    let sent = prepare(UpstreamKind::Openai, WANTED, PINNED, &request, None).expect("object");
    let body: Value = serde_json::from_slice(&sent.body).expect("JSON");
    assert!(body.get("return_token_ids").is_none() && body.get("top_k").is_none());
    assert_eq!(body["logprobs"], true);
    assert!(!is_untruncated(&sent.sampling_sent));
}

fn body(sent: &Prepared) -> Value {
    serde_json::from_slice(&sent.body).expect("JSON")
}

fn approach(kind: UpstreamKind, change: impl Fn(&mut Capabilities)) -> Approach {
    let mut capabilities = Capabilities::assumed(kind);
    change(&mut capabilities);
    Approach { capabilities, routing: true, usage: true, relay: Relay::Auto }
}

const STREAM: &str =
    r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true,"x":1},"tools":[]}"#;

/// Prepares a client's stream, sampling passed through.
fn streamed(approach: Approach) -> Prepared {
    prepare(approach, WANTED, SamplingPlan::PassThrough, &request(STREAM), None).expect("object")
}

#[test]
fn a_stream_is_asked_for_as_a_body_only_where_the_stream_would_lose_something() {
    let vllm = |change: fn(&mut Capabilities)| approach(UpstreamKind::Vllm, change);
    let same: fn(&mut Capabilities) = |_| {};
    for (approach, is_stream) in [
        (vllm(same), true),
        (vllm(|found| found.routing = true), false),
        (Approach { routing: false, ..vllm(|found| found.routing = true) }, true),
        (Approach { relay: Relay::Live, ..vllm(|found| found.routing = true) }, true),
        (Approach { relay: Relay::Destreamed, ..vllm(same) }, false),
        (vllm(|found| found.streams_ids = false), false),
        (approach(UpstreamKind::Embedded, same), true),
        (approach(UpstreamKind::Openai, same), true),
        (approach(UpstreamKind::Sglang, same), false),
        (Approach { relay: Relay::Live, ..approach(UpstreamKind::Sglang, same) }, true),
        (approach(UpstreamKind::Sglang, |found| found.ids = IdsChannel::None), true),
        (Approach::from(UpstreamKind::Sglang), true),
    ] {
        let sent = streamed(approach);
        assert_eq!(sent.upstream_is_stream, is_stream, "{approach:?}");
        let body = body(&sent);
        assert_eq!(body["stream"], is_stream);
        assert_eq!(body.get("stream_options").is_some(), is_stream, "{body}");
        // The client asked for usage itself.
        assert!(!sent.cut.usage);
    }
    let whole = request(r#"{"model":"m","messages":[]}"#);
    let routed = vllm(|found| found.routing = true);
    let sent = prepare(routed, WANTED, SamplingPlan::PassThrough, &whole, None).expect("object");
    assert!(!sent.upstream_is_stream && body(&sent).get("stream").is_none());
    // The server sends routing in every whole reply: it is the client's.
    assert_eq!(sent.cut.routed_experts, None);
    assert_eq!(streamed(routed).cut.routed_experts, Some(Unasked::Null));
}

#[test]
fn sglang_is_asked_for_ids_versions_and_routing_in_a_body() {
    let sent = streamed(approach(UpstreamKind::Sglang, |found| found.routing = true));
    let text = body(&sent);
    for name in ["return_token_ids", "logprobs", "return_meta_info", "return_routed_experts"] {
        assert_eq!(text[name], true, "{name}");
    }
    assert!(text.get("return_weight_versions").is_none());
    let cut = &sent.cut;
    assert_eq!((cut.token_ids, cut.prompt_token_ids), (Some(Unasked::Absent), Some(Unasked::Absent)));
    assert_eq!((cut.meta_info, cut.logprobs), (Some(Unasked::Absent), Some(Unasked::Null)));
    assert!(cut.sglext);
    let dense = body(&streamed(approach(UpstreamKind::Sglang, |_| {})));
    assert!(dense.get("return_routed_experts").is_none(), "servers without routing may refuse it");
    let older = body(&streamed(approach(UpstreamKind::Sglang, |found| found.ids = IdsChannel::MetaInfo)));
    assert_eq!((&older["return_prompt_token_ids"], &older["return_meta_info"]), (&true.into(), &true.into()));
    // Its streams refuse all of them.
    let live = body(&streamed(Approach::from(UpstreamKind::Sglang)));
    assert!(live.get("return_token_ids").is_none() && live.get("return_meta_info").is_none());
}

#[test]
fn what_an_sglang_client_asked_for_itself_stays_where_it_looks_for_it() {
    let own = request(
        r#"{"model":"m","messages":[],"return_token_ids":true,"return_routed_experts":true,"logprobs":true}"#,
    );
    let routed = approach(UpstreamKind::Sglang, |found| found.routing = true);
    let sent = prepare(routed, WANTED, SamplingPlan::PassThrough, &own, None).expect("object");
    assert_eq!(sent.body, own.body());
    assert!(sent.cut.is_nothing());
}

#[test]
fn old_vllm_gives_ids_in_the_place_of_token_texts_unless_the_client_wants_those() {
    let old = approach(UpstreamKind::Vllm, |found| {
        (found.ids, found.streams_ids) = (IdsChannel::TokenStrings, false);
    });
    let sent = streamed(old);
    let text = body(&sent);
    assert_eq!((&text["return_tokens_as_token_ids"], &text["logprobs"]), (&true.into(), &true.into()));
    assert!(text.get("return_token_ids").is_none());
    assert_eq!(sent.cut.logprobs, Some(Unasked::Null));
    assert!(!sent.upstream_is_stream);
    let own = request(r#"{"model":"m","messages":[],"logprobs":true}"#);
    let sent = prepare(old, WANTED, SamplingPlan::PassThrough, &own, None).expect("object");
    assert_eq!(sent.body, own.body());
}

#[test]
fn a_server_of_messages_is_not_asked_in_chats_words() {
    let sent = prepare(UpstreamKind::Anthropic, WANTED, PINNED, &request(STREAM), None).expect("object");
    assert_eq!(sent.body, request(STREAM).body());
    assert!(sent.cut.is_nothing());
}

#[test]
fn c10_log_probs_are_of_the_distribution_that_the_engine_says() {
    let request = request(r#"{"model":"m","messages":[]}"#);
    let pinned = |temperature| SamplingPlan::Pinned { temperature, seed: 1 };
    let of = |kind, plan| prepare(kind, WANTED, plan, &request, None).expect("object").logprob_semantics;
    use LogprobSemantics::{RawT1, TempScaled, Unknown};
    for (kind, at_1, at_other, greedy, unknown) in [
        (UpstreamKind::Vllm, RawT1, Unknown, Unknown, Unknown),
        (UpstreamKind::Embedded, RawT1, RawT1, RawT1, RawT1),
        (UpstreamKind::Sglang, RawT1, TempScaled, RawT1, TempScaled),
        (UpstreamKind::Openai, Unknown, Unknown, Unknown, Unknown),
    ] {
        assert_eq!(of(kind, pinned(1.0)), at_1, "{kind:?}");
        assert_eq!(of(kind, pinned(0.6)), at_other, "{kind:?}");
        assert_eq!(of(kind, pinned(0.0)), greedy, "{kind:?}");
        assert_eq!(of(kind, SamplingPlan::PassThrough), unknown, "{kind:?}");
    }
}

/// An engine that fills what a request leaves out from its model's generation_config.
fn filled(body: &Value) -> Vec<f64> {
    let hidden = [
        ("temperature", 0.6),
        ("top_p", 0.95),
        ("top_k", 20.0),
        ("min_p", 0.05),
        ("repetition_penalty", 1.05),
        ("presence_penalty", 0.1),
        ("frequency_penalty", 0.1),
    ];
    hidden.map(|(name, default)| body[name].as_f64().unwrap_or(default)).to_vec()
}

#[test]
fn law_12_no_hidden_default_of_an_engine_is_left_to_it_in_any_dialect() {
    let asked = [
        r#"{"model":"m","messages":[]}"#,
        r#"{"model":"m","messages":[],"stream":true}"#,
        r#"{"model":"m","messages":[],"temperature":null,"top_p":null,"top_k":null,"min_p":null,"seed":null}"#,
        r#"{"model":"m","messages":[],"temperature":0.2,"top_p":0.5,"top_k":3,"repetition_penalty":1.2,"logit_bias":{"1":-100}}"#,
    ];
    let neutral = [1.0, 1.0, -1.0, 0.0, 1.0, 0.0, 0.0];
    for kind in [UpstreamKind::Embedded, UpstreamKind::Vllm, UpstreamKind::Sglang] {
        for ids in [IdsChannel::TokenIds, IdsChannel::MetaInfo, IdsChannel::TokenStrings, IdsChannel::None] {
            for relay in [Relay::Auto, Relay::Live, Relay::Destreamed] {
                let approach = Approach { relay, ..approach(kind, |found| found.ids = ids) };
                for text in asked {
                    let request = request(text);
                    for sent in [
                        prepare(approach, WANTED, PINNED, &request, None).expect("object"),
                        prepare_plain(approach, PINNED, &request, None).expect("object"),
                    ] {
                        let body = body(&sent);
                        assert_eq!(filled(&body), neutral, "{kind:?} {text}");
                        assert!(body.get("logit_bias").is_none());
                        assert_eq!(body["seed"], 9);
                        assert!(is_untruncated(&sent.sampling_sent));
                        assert_eq!(sent.sampling_sent.temperature, Some(1.0));
                        assert_eq!(sent.logprob_semantics, LogprobSemantics::RawT1);
                    }
                }
            }
        }
    }
    // A gateway is pinned in what it knows; what it may hide makes the call not trainable.
    let sent = prepare(UpstreamKind::Openai, WANTED, PINNED, &request(asked[3]), None).expect("object");
    assert_eq!((&body(&sent)["temperature"], &body(&sent)["top_p"]), (&1.0.into(), &1.0.into()));
    assert!(!is_untruncated(&sent.sampling_sent));
    // Passed through, what nobody sent is not known.
    let sent = prepare(UpstreamKind::Vllm, WANTED, SamplingPlan::PassThrough, &request(asked[0]), None);
    assert_eq!(sent.expect("object").sampling_sent, Sampling::default());
}

#[test]
fn law_12_what_changes_the_distribution_beside_its_parameters_is_told() {
    let neutral = r#""temperature":1,"top_p":1.0,"top_k":-1,"min_p":0.0,"repetition_penalty":1.0,"frequency_penalty":0,"presence_penalty":0"#;
    let text = |more: &str| format!(r#"{{"model":"m","messages":[],{neutral}{more}}}"#);
    let sent = |more: &str, plan| {
        let request = Request::parse(Bytes::from(text(more))).expect("request");
        prepare(UpstreamKind::Vllm, WANTED, plan, &request, None).expect("object")
    };
    let passed = sent("", SamplingPlan::PassThrough);
    assert_eq!((passed.is_shaped, passed.logprob_semantics), (false, LogprobSemantics::RawT1));
    for name in UNPINNED {
        let null = sent(&format!(r#","{name}":null"#), SamplingPlan::PassThrough);
        assert!(!null.is_shaped, "{name}");
        let more = format!(r#","{name}":[5]"#);
        let passed = sent(&more, SamplingPlan::PassThrough);
        assert_eq!((passed.is_shaped, passed.logprob_semantics), (true, LogprobSemantics::Unknown), "{name}");
        let pinned = sent(&more, PINNED);
        assert_eq!((pinned.is_shaped, pinned.logprob_semantics), (false, LogprobSemantics::RawT1), "{name}");
    }
    let defaults = r#","logit_bias":{},"bad_words":[],"min_tokens":0,"ignore_eos":false,"logits_processors":[],
        "use_beam_search":false,"best_of":1,"length_penalty":1.0,"vllm_xargs":{}"#;
    assert!(!sent(defaults, SamplingPlan::PassThrough).is_shaped, "values that do nothing");
    for more in
        [r#","min_tokens":1"#, r#","ignore_eos":true"#, r#","best_of":2"#, r#","allowed_token_ids":[]"#]
    {
        assert!(sent(more, SamplingPlan::PassThrough).is_shaped, "{more}");
    }
}

#[test]
fn labels_of_weights_are_believed_spans_first() {
    let mut reply = Reply { weight_version: Some("5".into()), ..Reply::default() };
    let mut choice = Choice { token_ids: Some(vec![1, 2]), ..Choice::default() };
    let (spans, source) = told_weights(&reply, &choice).expect("told");
    let span = |version: &str, start, end| WeightSpan { version: version.into(), start, end };
    assert_eq!((spans, source), (Some(vec![span("5", 0, 2)]), WeightSource::ReplySingle));
    choice.weight_version = Some("6".into());
    assert_eq!(told_weights(&reply, &choice).expect("told").0, Some(vec![span("6", 0, 2)]));
    (choice.weight_version, reply.weight_version) = (None, Some("default".into()));
    assert_eq!(told_weights(&reply, &choice), None);
    let told = |version: &str, start, end| VersionSpan { version: version.into(), start, end };
    // Spans of weights that nobody labelled say as little as such a label.
    choice.weight_versions = Some(vec![told("default", 0, 1), told("default", 1, 2)]);
    assert_eq!(told_weights(&reply, &choice), None);
    choice.weight_versions = Some(vec![told("default", 0, 1), told("7", 1, 2)]);
    let expected = vec![span("default", 0, 1), span("7", 1, 2)];
    assert_eq!(told_weights(&reply, &choice), Some((Some(expected), WeightSource::ReplySpans)));
    choice.weight_versions = Some(vec![told("7", 0, 2)]);
    let expected = (Some(vec![span("7", 0, 2)]), WeightSource::ReplySpans);
    assert_eq!(told_weights(&reply, &choice), Some(expected));
}

#[test]
fn ids_written_as_text_are_exact_and_say_where_they_came_from() {
    let mut choice = Choice::default();
    assert_eq!(completion_ids_source(&choice), IdsSource::Absent);
    choice.token_ids = Some(vec![1]);
    assert_eq!(completion_ids_source(&choice), IdsSource::Engine);
    choice.ids_from = IdsFrom::TokenStrings;
    assert_eq!(completion_ids_source(&choice), IdsSource::TokenIdStrings);
}

/// What a probe's reply shows decides how a stream is asked for; the body that comes becomes the client's stream.
#[test]
fn law_5_a_body_asked_for_in_a_streams_place_leaves_no_trace_of_lego() {
    use crate::protocol::chat::{cut, destream};
    use crate::protocol::json;
    for (kind, name) in
        [(UpstreamKind::Vllm, "vllm_chat_routed.json"), (UpstreamKind::Sglang, "sglang_chat.json")]
    {
        let path = format!("{}/tests/fixtures/wire/{name}", env!("CARGO_MANIFEST_DIR"));
        let reply = std::fs::read(path).expect("fixture");
        let capabilities = Capabilities::from_reply(kind, 200, &reply).expect("a chat reply");
        let approach = Approach { capabilities, routing: true, usage: true, relay: Relay::Auto };
        for (asked, traces) in [
            (r#"{"model":"m","messages":[],"stream":true}"#, vec![]),
            (r#"{"model":"m","messages":[],"stream":true,"logprobs":true}"#, vec!["logprob\""]),
            (
                r#"{"model":"m","messages":[],"stream":true,"return_token_ids":true,"stream_options":{"include_usage":true}}"#,
                vec!["token_ids", "usage"],
            ),
        ] {
            let request = request(asked);
            let plan = SamplingPlan::PassThrough;
            let sent = prepare(approach, WANTED, plan, &request, Some("policy")).expect("object");
            assert!(!sent.upstream_is_stream);
            assert_eq!(body(&sent)["stream"], false);
            let edits = cut(&reply, &sent.cut).expect("body").edits;
            let left = json::apply(&reply, &edits);
            let events = destream::events(&left, request.asks_usage).expect("a chat reply");
            let text = String::from_utf8(destream::to_stream(&events).to_vec()).expect("text");
            for name in ["token_ids", "logprob\"", "usage"] {
                assert_eq!(text.contains(name), traces.contains(&name), "{name} {asked}: {text}");
            }
            for name in ["routed_experts", "meta_info", "sglext", "weight_version", "metadata", "toy-moe"] {
                assert!(!text.contains(name), "{name} {asked}: {text}");
            }
            let mut client = Reply::default();
            for event in &events {
                client.feed(event).expect("readable");
            }
            assert_eq!(client.model.as_deref(), Some("m"));
            assert!(client.choices[&0].text.ends_with("Hello! 🎉") && client.is_finished(1));
        }
    }
}
