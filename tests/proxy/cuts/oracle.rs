//! What is right, for a reply that is cut at a byte.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lego::record::{Call, CallStatus, UpstreamKind};
use serde_json::{Value, json};

use super::Api;
use super::fixtures::{self, Told, told};
use super::wire::{Answer, Client, How, Reply, Rig};

/// A reply as the upstream's answer to a request, with what came of it in one write.
pub struct Case {
    name: String,
    number: usize,
    kind: UpstreamKind,
    api: Api,
    request: String,
    /// Choices that were asked for.
    n: usize,
    /// The client asked for a stream.
    is_stream: bool,
    reply: Reply,
    /// The reply is of another protocol than its route.
    is_foreign: bool,
    /// What is told, and what the client gets of it, up to the end of each event.
    steps: Vec<(usize, Told, Vec<u8>)>,
    whole: Option<Seen>,
    /// The same without what follows the finish reason.
    finished: Option<Seen>,
}

/// A call as client and store saw it; what differs from call to call is taken out.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    status: u16,
    client: String,
    is_whole: bool,
    records: Vec<String>,
}

impl Case {
    pub fn new(name: &str, number: usize, kind: UpstreamKind, api: Api, request: Value) -> Self {
        let case = Self::of(fixtures::reply(name, kind), number, kind, api, request);
        Self { name: name.to_owned(), ..case }
    }

    pub fn of(reply: Reply, number: usize, kind: UpstreamKind, api: Api, request: Value) -> Self {
        let mut ends: Vec<usize> = vec![0];
        if reply.is_stream {
            let blocks = String::from_utf8(reply.body.clone()).expect("text");
            for block in blocks.split_inclusive("\n\n") {
                ends.push(ends[ends.len() - 1] + block.len());
            }
        }
        let step = |end: usize| {
            let plain = std::str::from_utf8(&reply.body[..end]).expect("text");
            let is_chat = reply.is_stream && reply.plain != reply.body;
            let plain = if is_chat { fixtures::plain_stream(plain, kind) } else { plain.to_owned() };
            (end, told(&reply.body, reply.is_stream, end), plain.into_bytes())
        };
        Self {
            name: String::from_utf8_lossy(&reply.body).chars().take(40).collect(),
            number,
            kind,
            api,
            n: request["n"].as_u64().unwrap_or(1) as usize,
            is_stream: request["stream"] == true,
            request: request.to_string(),
            steps: ends.into_iter().map(step).collect(),
            reply,
            is_foreign: false,
            whole: None,
            finished: None,
        }
    }

    pub fn foreign(mut self) -> Self {
        self.is_foreign = true;
        // What is cut out of chat is nothing that the native endpoint is asked for.
        if self.is_native() {
            let body = &self.reply.body;
            self.steps.iter_mut().for_each(|(end, _, plain)| *plain = body[..*end].to_vec());
        }
        self
    }

    /// What the upstream sends.
    pub fn sent(&self) -> &[u8] {
        &self.reply.body
    }

    /// Events of the upstream's reach the client as bytes.
    fn is_same_protocol(&self) -> bool {
        let is_chat = matches!(self.api, Api::Chat | Api::Completions);
        (is_chat && !self.is_native())
            || self.api == Api::Generate
            || self.kind == UpstreamKind::Anthropic
            || self.passes_responses()
    }

    /// The upstream writes the client's responses itself.
    fn passes_responses(&self) -> bool {
        let is_gateways = self.api == Api::Responses && self.kind == UpstreamKind::Openai;
        is_gateways && !self.name.starts_with("openai")
    }

    /// The upstream is asked at SGLang's native endpoint.
    fn is_native(&self) -> bool {
        self.kind == UpstreamKind::Sglang && matches!(self.api, Api::Completions | Api::Generate)
    }

    /// lego asks for nothing that the client does not.
    fn is_untouched(&self) -> bool {
        let asks_all = self.request.contains("include_usage") || self.request.contains("return_logprob");
        self.kind == UpstreamKind::Anthropic || self.passes_responses() || asks_all
    }

    /// No reader of chat finds anything in it.
    fn is_unreadable(&self) -> bool {
        let others = ["anthropic", "responses", "sglang_generate", "sse_"];
        self.is_foreign && (self.is_native() || others.iter().any(|other| self.name.starts_with(other)))
    }

    async fn call(&self, rig: &Rig, client: &mut Client, how: How) -> (Answer, Vec<Call>) {
        let answer = client.call(self.api.route(), &self.request, self.number, how).await;
        let calls = rig.store.take(&answer.call_id);
        (answer, calls)
    }

    /// The same case, after calls that are not cut were looked at.
    pub async fn with_baselines(mut self, rig: &Rig) -> Self {
        let mut client = Client::new(rig.proxy);
        let (answer, calls) = self.call(rig, &mut client, How::Whole).await;
        if self.is_same_protocol() && !self.is_foreign && self.reply.is_stream == self.is_stream {
            let mut upstream = Client::new(rig.upstream);
            let direct = upstream.call(self.api.route(), &self.request, self.number, How::Whole).await;
            if direct.status == 200 {
                assert_eq!(answer.text(), direct.text(), "{}: the bytes of a direct call", self.name);
            }
        }
        self.look_at_whole(&answer, &calls);
        self.whole = Some(seen(&answer, &calls));
        let finish = |at: &usize| self.told(*at).status(self.n) == CallStatus::Ok;
        let ends = fixtures::events(self.sent()).into_iter().map(|(_, end)| end);
        let end = ends.into_iter().find(finish).filter(|_| self.reply.is_stream && !self.is_unreadable());
        if let Some(end) = end {
            let (answer, calls) = self.call(rig, &mut client, How::Broken(end)).await;
            self.finished = Some(seen(&answer, &calls));
        }
        self
    }

    /// The last event that ends within so many bytes.
    fn step(&self, length: usize) -> &(usize, Told, Vec<u8>) {
        self.steps.iter().rev().find(|(end, ..)| *end <= length).expect("the beginning")
    }

    fn told(&self, length: usize) -> Told {
        if self.reply.is_stream { self.step(length).1.clone() } else { told(self.sent(), false, length) }
    }

    /// The whole reply says to the client, in its protocol, what the upstream said.
    fn look_at_whole(&self, answer: &Answer, calls: &[Call]) {
        let told = self.told(self.sent().len());
        if self.is_unreadable() || self.reply.status != 200 {
            return assert!(calls.iter().all(|call| call.status != CallStatus::Ok), "{}", self.name);
        }
        if self.is_foreign {
            return;
        }
        assert_eq!(calls[0].status, told.status(self.n), "{}", self.name);
        self.look_at_records(calls, &told);
        if told.status(self.n) != CallStatus::Ok || told.choices[&0].finish.as_deref() == Some("abort") {
            return assert!(
                !has_end(self.api, &answer.text()) || self.is_same_protocol(),
                "{}",
                answer.text()
            );
        }
        assert!(answer.is_whole, "{}", self.name);
        let said = &told.choices[&0];
        let (text, arguments) = client_reads(self.api, self.is_stream, &answer.text());
        assert_eq!(text, said.text, "{}", self.name);
        assert_eq!(arguments, said.calls, "{}", self.name);
        assert!(!self.is_stream || has_end(self.api, &answer.text()), "{}", answer.text());
    }

    /// Makes the call and looks at what came of it.
    pub async fn look_at(&self, rig: &Rig, client: &mut Client, how: How) {
        let (answer, calls) = self.call(rig, client, how).await;
        let about = format!("{} in {:?} {how:?}", self.name, self.api);
        let whole = self.whole.as_ref().expect("a baseline");
        let (at, is_broken) = match how {
            How::Split(_) | How::Whole => return assert_eq!(seen(&answer, &calls), *whole, "{about}"),
            How::Broken(at) => (at, true),
            How::Ended(at) => (at, false),
        };
        let is_complete = at == self.sent().len() && !(is_broken && self.reply.is_stream);
        if is_complete {
            assert_eq!(seen(&answer, &calls), *whole, "{about}");
        } else if self.reply.is_stream {
            self.look_at_stream(&answer, &calls, at, is_broken, &about);
        } else {
            self.look_at_body(&answer, &calls, at, is_broken, &about);
        }
    }

    fn look_at_stream(&self, answer: &Answer, calls: &[Call], at: usize, is_broken: bool, about: &str) {
        let told = self.told(at);
        let status = told.status(self.n);
        let whole = self.whole.as_ref().expect("a baseline");
        let said_done = String::from_utf8_lossy(&self.sent()[..at]).contains("data: [DONE]");
        if self.is_unreadable() {
            assert!(calls.iter().all(|call| call.status != CallStatus::Ok), "{about}");
            assert!(!is_broken || !answer.is_whole || said_done, "{about}");
        } else {
            let own = |call: &Call| match status {
                CallStatus::Truncated if call.finish_reason.is_some() => CallStatus::Ok,
                status => status,
            };
            assert!(calls.iter().all(|call| call.status == own(call)), "{about}: {:?}", calls[0].error);
            assert!(status == CallStatus::Ok || calls.iter().all(|call| !call.trainable), "{about}");
            self.look_at_records(calls, &told);
            let is_whole = match status {
                CallStatus::Ok => true,
                CallStatus::Truncated => false,
                // An error is said, then it ends as the upstream did; what lego said itself breaks off.
                _ if self.is_same_protocol() => {
                    !is_broken || said_done || self.kind == UpstreamKind::Anthropic
                }
                _ => whole.is_whole,
            };
            assert_eq!(answer.is_whole, is_whole, "{about}: {}", answer.text());
        }
        if self.passes_responses() && status == CallStatus::Truncated {
            return self.look_at_failure(&answer.text(), at, about);
        }
        if self.is_same_protocol() {
            assert_eq!(answer.text(), String::from_utf8_lossy(&self.expected(at)), "{about}");
            return;
        }
        let seen = seen(answer, calls);
        let client = without_error(&seen.client);
        let is_prefix = without_error(&whole.client).starts_with(client);
        if self.is_unreadable() {
            return assert!(is_prefix, "{about}: {client}");
        }
        match status {
            CallStatus::Ok if told.usage == self.told(self.sent().len()).usage => {
                assert_eq!(seen, *whole, "{about}");
            }
            CallStatus::Ok => {
                assert_eq!(seen.client, self.finished.as_ref().expect("a baseline").client, "{about}");
            }
            CallStatus::UpstreamError if told.usage == self.told(self.sent().len()).usage => {
                assert_eq!(seen.client, whole.client, "{about}");
            }
            // Its error may tell the usage.
            CallStatus::UpstreamError => {
                assert_eq!(client, without_error(&whole.client), "{about}");
                assert_ne!(client, seen.client, "{about}");
            }
            _ => assert!(is_prefix && !has_end(self.api, client), "{about}: {client}"),
        }
    }

    /// A response that broke off has its whole events, and an end of lego's that its clients understand.
    fn look_at_failure(&self, client: &str, at: usize, about: &str) {
        let (end, ..) = self.step(at);
        let (passed, own) = client.split_at(*end);
        assert_eq!(passed.as_bytes(), &self.sent()[..*end], "{about}");
        let own: Vec<Value> = fixtures::events(own.as_bytes()).into_iter().map(|(event, _)| event).collect();
        let first = passed.matches("\n\n").count() as u64;
        let numbers = own.iter().map(|event| event["sequence_number"].as_u64().expect("a number"));
        assert!(numbers.eq(first..first + own.len() as u64), "{about}: {own:?}");
        assert_eq!(own.len(), if *end == 0 { 2 } else { 1 }, "{about}");
        let last = &own[own.len() - 1];
        assert_eq!(
            (last["type"].as_str(), &last["response"]["output"]),
            (Some("response.failed"), &json!([]))
        );
        assert!(last["response"]["error"]["message"].is_string(), "{about}: {last}");
    }

    /// Half an event is no event; it passes where nothing is to be cut out of it.
    fn expected(&self, at: usize) -> Vec<u8> {
        let sent = &self.sent()[..at];
        if self.is_untouched() {
            return sent.to_vec();
        }
        let (end, _, plain) = self.step(at);
        let (mut out, half) = (plain.clone(), &sent[*end..]);
        if !half.starts_with(b"data") || half.starts_with(b"data: [DONE]") {
            out.extend_from_slice(half);
        }
        out
    }

    fn look_at_body(&self, answer: &Answer, calls: &[Call], at: usize, is_broken: bool, about: &str) {
        let part = &self.sent()[..at];
        let is_json = serde_json::from_slice::<Value>(part).is_ok();
        let status = match (is_broken, self.reply.status) {
            (true, _) => CallStatus::Truncated,
            (false, 200) if is_json => return,
            (false, 200) => CallStatus::ParseError,
            (false, _) => CallStatus::UpstreamError,
        };
        assert_eq!(calls.iter().map(|call| call.status).collect::<Vec<_>>(), [status], "{about}");
        let call = &calls[0];
        assert!(
            !call.trainable && call.completion_token_ids.is_none() && call.finish_reason.is_none(),
            "{about}"
        );
        if self.is_stream && self.reply.status == 200 {
            // Nothing of it could be said: it was not whole.
            assert!(!answer.is_whole, "{about}");
            let client = seen(answer, calls).client;
            let whole = &self.whole.as_ref().expect("a baseline").client;
            assert!(whole.starts_with(without_error(&client)), "{about}: {client}");
            return assert!(!has_end(self.api, &client), "{about}: {client}");
        }
        assert!(answer.is_whole, "{about}");
        if status == CallStatus::ParseError && self.is_same_protocol() {
            // The engine said that this is all.
            return assert_eq!((answer.status, &answer.body[..]), (200, part), "{about}");
        }
        let expected = if status == CallStatus::UpstreamError { self.reply.status } else { 502 };
        assert_eq!(answer.status, expected, "{about}");
        let error: Value = serde_json::from_slice(&answer.body).expect("JSON");
        assert!(
            error["error"]["message"].as_str().is_some_and(|message| !message.is_empty()),
            "{about}: {error}"
        );
        assert_eq!(error["type"] == "error", self.api == Api::Messages, "{about}: {error}");
    }

    /// The records say what was told, and nothing else.
    fn look_at_records(&self, calls: &[Call], told: &Told) {
        let indexes: Vec<u16> = calls.iter().map(|call| call.choice_index).collect();
        let expected: Vec<u16> = told.choices.keys().copied().collect();
        assert_eq!(indexes, if expected.is_empty() { vec![0] } else { expected }, "{}", self.name);
        for call in calls {
            let said = told.choices.get(&call.choice_index).cloned().unwrap_or_default();
            let calls = call.tool_calls.iter().flatten().map(|call| call.arguments.clone());
            assert_eq!(call.completion_token_ids, said.ids, "{}", self.name);
            assert_eq!(call.completion_logprobs, said.logprobs, "{}", self.name);
            assert_eq!(call.text.clone().unwrap_or_default(), said.text, "{}", self.name);
            assert_eq!(calls.collect::<Vec<_>>(), said.calls, "{}", self.name);
            assert_eq!(call.finish_reason, said.finish, "{}", self.name);
            let sent = self.is_native().then(|| super::PROMPT.to_vec());
            assert_eq!(call.prompt_token_ids, told.prompt_ids.clone().or(sent), "{}", self.name);
            let usage = call.usage.map(|usage| (usage.prompt_tokens, usage.completion_tokens));
            assert_eq!(usage, told.usage, "{}", self.name);
        }
    }
}

/// The protocol's last words.
fn has_end(api: Api, client: &str) -> bool {
    let ends: &[&str] = match api {
        Api::Chat | Api::Completions => &["[DONE]", "\"finish_reason\":\""],
        Api::Generate => &["[DONE]", "\"finish_reason\":{"],
        Api::Messages => &["message_stop", "\"stop_reason\":\""],
        Api::Responses => &["response.completed", "response.incomplete"],
    };
    ends.iter().any(|end| client.contains(end))
}

/// A stream without the error that lego ended it with.
fn without_error(client: &str) -> &str {
    let starts = ["event: error", "event: response.failed", "data: {\"error\""];
    let start = starts.iter().filter_map(|start| client.rfind(start)).min();
    &client[..start.unwrap_or(client.len())]
}

/// Text and tool calls as a client puts them together.
fn client_reads(api: Api, is_stream: bool, client: &str) -> (String, Vec<String>) {
    if matches!(api, Api::Chat | Api::Completions | Api::Generate) {
        let told = told(client.as_bytes(), is_stream, client.len());
        let said = &told.choices[&0];
        return (said.text.clone(), said.calls.clone());
    }
    let (mut text, mut calls) = (String::new(), Vec::new());
    if !is_stream {
        let body: Value = serde_json::from_str(client).expect("JSON");
        for item in body["content"].as_array().or(body["output"].as_array()).into_iter().flatten() {
            let part = if item["type"] == "message" { &item["content"][0]["text"] } else { &item["text"] };
            text.push_str(part.as_str().unwrap_or_default());
            calls.extend(item["arguments"].as_str().or(item["input"].as_str()).map(str::to_owned));
        }
        return (text, calls);
    }
    for (event, _) in fixtures::events(client.as_bytes()) {
        match event["type"].as_str().expect("a type") {
            "content_block_start" if event["content_block"]["type"] == "tool_use" => {
                calls.push(String::new())
            }
            "content_block_delta" => {
                text.push_str(event["delta"]["text"].as_str().unwrap_or_default());
                if let Some(more) = event["delta"]["partial_json"].as_str() {
                    calls.last_mut().expect("a call").push_str(more);
                }
            }
            "response.output_text.delta" => text.push_str(event["delta"].as_str().expect("text")),
            "response.custom_tool_call_input.done" => {
                calls.push(event["input"].as_str().expect("text").to_owned());
            }
            "response.function_call_arguments.done" => {
                calls.push(event["arguments"].as_str().expect("text").to_owned());
            }
            _ => {}
        }
    }
    (text, calls)
}

fn seen(answer: &Answer, calls: &[Call]) -> Seen {
    let record = |call: &Call| {
        let mut call = call.clone();
        (call.received_at, call.ttft_us, call.duration_us) = (0, None, 0);
        serde_json::to_string(&call).expect("JSON").replace(&answer.call_id, "ID")
    };
    Seen {
        status: answer.status,
        client: without_ids(&answer.text()),
        is_whole: answer.is_whole,
        records: calls.iter().map(record).collect(),
    }
}

/// Without what lego makes up for each call: ids made of a UUID, and the time.
fn without_ids(client: &str) -> String {
    let is_uuid = |part: &[u8]| {
        part.iter().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
    };
    let mut out = client.to_owned();
    for prefix in ["\"msg_", "\"resp_", "\"req_", "\"cmpl-"] {
        let at = client.find(prefix).map_or(client.len(), |at| at + prefix.len());
        if let Some(uuid) = client.get(at..at + 36).filter(|uuid| is_uuid(uuid.as_bytes())) {
            out = out.replace(&STANDARD.encode(format!("lego:v1:{uuid}")), "SIGNATURE").replace(uuid, "UUID");
        }
    }
    for created in ["\"created_at\":", "\"created\":"] {
        let Some(at) = out.find(created).map(|at| at + created.len()) else { continue };
        let digits = out[at..].bytes().take_while(u8::is_ascii_digit).count();
        let time = format!("{created}{}", &out[at..at + digits]);
        out = out.replace(&time, created);
    }
    out
}
