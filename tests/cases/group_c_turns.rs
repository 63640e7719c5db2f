//! Group C, over several turns and on both sides of a translated call.

use lego::record::{Call, CallStatus, ClientApi, IdsSource};
use serde_json::{Value, json};

use crate::mock::{PROMPT_IDS, Part, Script};
use crate::setup::{Setup, post, request, spec, text as whole};
use crate::speech::messages;
use crate::support::{choice, done, head, sampled, session, stream, strict_events, trained, usage};

/// The ids that are trained, of each sample.
fn targets(calls: &[Call]) -> Vec<Vec<u32>> {
    let of = |sample: &lego::record::Sample| {
        let tokens = sample.token_ids.iter().zip(&sample.loss_mask);
        tokens.filter(|(_, is_target)| **is_target).map(|(id, _)| *id).collect()
    };
    trained(calls).samples.iter().map(of).collect()
}

#[tokio::test]
async fn c13_a_template_that_rewrites_history_begins_another_sample() {
    let turn = |prompt: &[u32], ids: &[u32]| {
        let logprobs = vec!["-0.5"; ids.len()];
        (sampled(prompt, &[("x", ids, &logprobs)], "stop"), request(true))
    };
    // The second prompt lacks the thinking 30, 31 of the first turn; the third extends the second.
    let (_, calls) = session(vec![
        turn(&[1, 2], &[30, 31, 4]),
        turn(&[1, 2, 4, 9], &[5]),
        turn(&[1, 2, 4, 9, 5, 9], &[6]),
    ])
    .await;
    assert!(calls.iter().all(|call| call.trainable));
    assert_eq!(targets(&calls), [vec![30, 31, 4], vec![5, 6]]);
    let (_, calls) = session(vec![
        turn(&[1, 2], &[30, 31, 4]),
        turn(&[1, 2, 30, 31, 4, 9], &[5]),
        turn(&[1, 2, 30, 31, 4, 9, 5, 9], &[6]),
    ])
    .await;
    assert_eq!(targets(&calls), [vec![30, 31, 4, 5, 6]]);
}

#[tokio::test]
async fn c14_a_call_that_comes_back_in_other_words_is_no_prefix() {
    let arguments = "{\"a\": 1,\"b\":2}";
    let tool = json!({"tool_calls": [{"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": arguments}}]});
    let first = |prompt: &[u32], ids: &[u32]| {
        let mut head_event = head(
            json!([{"index": 0, "delta": {"role": "assistant"}, "logprobs": null, "finish_reason": null}]),
        );
        head_event["prompt_token_ids"] = json!(prompt);
        let entries: Vec<Value> = ids.iter().map(|_| json!({"logprob": -0.5})).collect();
        let last = choice(
            json!({"index": 0, "delta": tool, "logprobs": {"content": entries}, "finish_reason": "tool_calls", "token_ids": ids,
            "weight_versions": [{"version": "3", "start": 0, "end": ids.len()}]}),
        );
        stream(vec![
            Part::Event(head_event.to_string()),
            last,
            usage(prompt.len() as u64, ids.len() as u64),
            done(),
        ])
    };
    for (said, prompt, samples) in [
        (arguments, [1, 2, 40, 41, 9], vec![vec![40, 41, 50]]),
        ("{\"b\":2,\"a\":1}", [1, 2, 41, 40, 9], vec![vec![40, 41], vec![50]]),
    ] {
        let mut next = request(true);
        next["messages"] = json!([{"role": "user", "content": "hi"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": said}}]},
            {"role": "tool", "tool_call_id": "t", "content": "ok"}]);
        let turns = vec![(first(&[1, 2], &[40, 41]), request(true)), (first(&prompt, &[50]), next.clone())];
        let (_, calls) = session(turns).await;
        // What was sampled and what was said back are both kept as they were.
        assert_eq!(calls[0].tool_calls.as_ref().expect("calls")[0].arguments, arguments);
        let sent: Value =
            serde_json::from_str(calls[1].upstream_request.as_ref().expect("edited").get()).expect("JSON");
        assert_eq!(sent["messages"], next["messages"]);
        assert_eq!(targets(&calls), samples);
    }
}

#[tokio::test]
async fn c20_prompt_ids_come_once_and_each_choice_has_its_own_ids() {
    let part = |index: u64, ids: &[u32], reason: Option<&str>| {
        choice(
            json!({"index": index, "delta": {"content": "x"}, "logprobs": null, "finish_reason": reason, "token_ids": ids, "vendor_choice": [1]}),
        )
    };
    let mut first = head(json!([]));
    first["prompt_token_ids"] = json!(PROMPT_IDS);
    first["vendor"] = json!({"k": 1});
    let mut role =
        head(json!([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]));
    role["prompt_token_ids"] = json!(PROMPT_IDS);
    for heads in
        [vec![first.clone()], vec![role.clone()], vec![first.clone(), first], vec![role.clone(), role]]
    {
        let mut parts: Vec<Part> = heads.iter().map(|head| Part::Event(head.to_string())).collect();
        parts.extend([
            part(0, &[5], None),
            part(1, &[6, 7], None),
            part(1, &[], Some("stop")),
            part(0, &[8], Some("stop")),
            usage(4, 4),
            done(),
        ]);
        let mut body = request(true);
        body["n"] = json!(2);
        let (replies, calls) = session(vec![(stream(parts), body)]).await;
        assert_eq!(calls.len(), 2);
        for call in &calls {
            assert_eq!(call.prompt_token_ids.as_deref(), Some(&PROMPT_IDS[..]));
            assert_eq!(call.prompt_ids_source, IdsSource::Engine);
        }
        let mut ids: Vec<_> = calls
            .iter()
            .map(|call| (call.choice_index, call.completion_token_ids.clone().expect("ids")))
            .collect();
        ids.sort();
        assert_eq!(ids, [(0, vec![5, 8]), (1, vec![6, 7])]);
        // What lego does not know reaches the client.
        let reply = String::from_utf8_lossy(&replies[0]).into_owned();
        assert_eq!(reply.matches("\"vendor_choice\":[1]").count(), 4, "{reply}");
        assert_eq!(
            reply.matches("\"vendor\":{\"k\":1}").count(),
            heads.iter().filter(|head| head["vendor"].is_object()).count()
        );
        assert!(!reply.contains("151644"), "{reply}");
    }
}

#[tokio::test]
async fn c22_both_sides_of_a_translated_call_are_recorded() {
    let setup = Setup::trainer(Script::default()).await;
    let open = setup.proxy.open_session(spec("s1")).expect("open");
    let sent = messages(true);
    let url = format!("http://{}/sessions/s1/v1/messages", setup.address);
    let reply = whole(post(&url, &sent).await).await;
    assert_eq!(strict_events(&reply).last().expect("an end").0, "message_stop");
    let call = (*open.close().await.calls[0]).clone();
    assert_eq!((call.status, call.http_status), (CallStatus::Ok, 200));
    assert_eq!((call.client_api, call.upstream_api), (ClientApi::AnthropicMessages, ClientApi::OpenaiChat));
    let client: Value =
        serde_json::from_str(call.client_request.as_ref().expect("kept").get()).expect("JSON");
    assert_eq!(client, sent);
    let asked = setup.mock.asked().remove(0);
    assert_eq!(asked.uri.path(), "/v1/chat/completions");
    let upstream = call.upstream_request.as_ref().expect("kept").get();
    assert_eq!(upstream.as_bytes(), asked.body, "byte for byte what was sent");
    // What lego added is what the client's own words do not account for.
    for added in ["return_token_ids", "logprobs", "return_weight_versions", "stream_options", "seed"] {
        assert!(asked.json().get(added).is_some() && client.get(added).is_none(), "{added}");
    }
    let events: Vec<Value> = serde_json::from_str(call.response.as_ref().expect("kept").get()).expect("list");
    assert!(events.iter().all(|event| event["object"] == "chat.completion.chunk"));
    // Sent again as it was stored, it is the same prompt.
    let again = reqwest_again(&setup, upstream).await;
    assert!(
        again.contains(&format!("\"prompt_token_ids\":{}", json!(call.prompt_token_ids.expect("ids")))),
        "{again}"
    );
}

async fn reqwest_again(setup: &Setup, body: &str) -> String {
    let url = format!("{}/v1/chat/completions", setup.mock.url());
    let sent =
        crate::setup::client().post(url).header("content-type", "application/json").body(body.to_owned());
    String::from_utf8_lossy(&whole(sent.send().await.expect("an answer")).await).into_owned()
}
