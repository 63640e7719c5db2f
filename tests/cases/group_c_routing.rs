//! Group C, C16: rows of expert routing, one fewer than tokens.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lego::proxy::ProxyOptions;
use lego::record::UpstreamKind;
use lego::upstream::Upstream;
use lego::upstream::routing::RoutingHint;
use serde_json::json;

use crate::mock::{Mock, Script};
use crate::setup::{Setup, post, request, spec, text as whole, timeouts};
use crate::support::numbers;

/// A NumPy file of `rows` rows, one layer, two experts: row r has 2r and 2r + 1.
fn npy(rows: usize) -> String {
    let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({rows}, 1, 2), }}\n");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());
    file.extend((0..rows * 2).map(|id| id as u8));
    STANDARD.encode(file)
}

#[tokio::test]
async fn c16_ten_tokens_have_nine_rows_of_routing() {
    for (rows, start, is_taken) in [
        (9, None, true),
        (10, None, false),
        (8, None, false),
        (5, Some(4), true),
        (6, Some(4), false),
        (4, Some(4), false),
    ] {
        let body = json!({"id": "c", "object": "chat.completion", "created": 1, "model": "toy", "usage": numbers(4, 6),
            "prompt_token_ids": [1, 2, 3, 4], "choices": [{"index": 0, "message": {"role": "assistant", "content": "abc"},
                "finish_reason": "stop", "token_ids": [5, 6, 7, 8, 9, 10], "logprobs": {"content": vec![json!({"logprob": -0.5}); 6]},
                "weight_versions": [{"version": "3", "start": 0, "end": 6}], "routed_experts": npy(rows)}]});
        let mock =
            Mock::start(Script { body: Some(body.to_string().into_bytes()), ..Script::default() }).await;
        let upstream = Upstream::http(&mock.url(), UpstreamKind::Vllm, None, timeouts()).expect("upstream");
        let upstream = upstream.with_routing_hint(Some(RoutingHint::default()));
        let setup = Setup::in_front_of(upstream, ProxyOptions::trainer("policy"), mock).await;
        let open = setup.proxy.open_session(spec("s1")).expect("open");
        let mut asked = request(false);
        if let Some(start) = start {
            asked["routed_experts_prompt_start"] = json!(start);
        }
        let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
        let reply = whole(post(&url, &asked).await).await;
        assert!(
            String::from_utf8_lossy(&reply).contains(&npy(rows)),
            "the client has what it would have had"
        );
        let call = (*open.close().await.calls[0]).clone();
        assert_eq!(call.completion_token_ids.as_ref().expect("ids").len(), 6);
        if !is_taken {
            assert_eq!(call.not_trainable_reasons, ["routing_rows_mismatch"], "{rows} {start:?}");
            assert_eq!(call.routing, None);
            continue;
        }
        assert!(call.trainable, "{:?}", call.not_trainable_reasons);
        let routing = call.routing.expect("routing");
        let shape = routing.shape();
        assert_eq!((shape.start, shape.rows), (start.unwrap_or(0), rows as u32), "{rows} {start:?}");
        assert!(routing.ids().eq(0..rows as u32 * 2), "in their order");
    }
}
