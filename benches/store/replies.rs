//! What replies that a model sampled take: their ids, log-probs and expert routing.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use lego::capture::{Writer, WriterOptions};
use lego::record::{Call, CallId, CallSink, LayerAxis, Routing, RoutingDtype, RoutingShape};
use serde::Deserialize;

use crate::calls::call;
use crate::sizes;

/// A line of the file.
#[derive(Deserialize)]
struct Reply {
    session: String,
    prompt_ids: Vec<u32>,
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    /// Of all tokens but the last, in C order: `[token][layer][k]`.
    #[serde(default)]
    routing: Vec<u32>,
    layers: Option<u32>,
    top_k: Option<u32>,
    experts: Option<u32>,
}

impl Reply {
    fn call(&self) -> Call {
        let mut call = call(&self.session, &self.prompt_ids, &self.ids);
        call.call_id = CallId::now();
        call.completion_logprobs = Some(self.logprobs.iter().copied().map(Some).collect());
        (call.client_request, call.response, call.text, call.tool_calls) = (None, None, None, None);
        if let (Some(layers), Some(top_k)) = (self.layers, self.top_k) {
            let shape = RoutingShape {
                start: 0,
                rows: (self.prompt_ids.len() + self.ids.len()) as u32 - 1,
                layers,
                layer_axis: LayerAxis::MoeOnly,
                top_k,
                dtype: RoutingDtype::U8,
            };
            call.routing = Some(Routing::pack(shape, &self.routing).expect("so many ids"));
        }
        call
    }
}

/// Puts the replies of a file into a store and prints what its columns take.
pub fn measure(path: &Path) {
    let lines = BufReader::new(File::open(path).expect("a file of replies")).lines();
    let replies: Vec<Reply> =
        lines.map(|line| serde_json::from_str(&line.expect("a line")).expect("a reply")).collect();
    let dir = tempfile::Builder::new().prefix("lego-bench").tempdir().expect("folder");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let writer = Writer::open(dir.path(), WriterOptions::default()).expect("a free folder");
        for reply in &replies {
            writer.append(vec![reply.call()]).await.expect("room");
        }
        writer.close().await;
    });
    sizes::print(dir.path());
    let columns = sizes::columns(dir.path());
    let sampled: usize = replies.iter().map(|reply| reply.ids.len()).sum();
    for name in sizes::TOKENS {
        println!("{name}: {:.2} bytes a sampled token", columns[name] as f64 / sampled as f64);
    }
    if let Some(experts) = replies.first().and_then(|reply| reply.experts) {
        let chosen: usize = replies.iter().map(|reply| reply.routing.len()).sum();
        let bits = u32::BITS - (experts - 1).leading_zeros();
        let packed = chosen as f64 * f64::from(bits) / 8.0;
        println!("routing: {:.3} x bit-packed ({bits} bits a choice)", columns["routing"] as f64 / packed);
    }
}
