//! Clients that take nothing of their reply: their calls end all the same.

use std::time::Duration;

use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, UpstreamKind};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::mock::{Part, Script};
use crate::setup::{PATIENCE, Setup, request, spec};

/// A stream of more than sockets buffer.
fn endless() -> Script {
    let spoil = |parts: Vec<Part>| {
        let Part::Event(event) = &parts[1] else { unreachable!("events only") };
        let large = Part::Event(event.replace("Hello", &"x".repeat(64 << 10)));
        let many = std::iter::repeat_n(large, 1000);
        parts[..1].iter().cloned().chain(many).chain(parts[1..].iter().cloned()).collect()
    };
    Script { spoil: Some(spoil), ..Script::default() }
}

/// A client that reads the beginning of its reply, and then nothing.
async fn stuck(setup: &Setup, path: &str) -> TcpStream {
    let body = request(true).to_string();
    let mut stream = TcpStream::connect(setup.address).await.expect("connected");
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.expect("sent");
    let mut first = [0; 64];
    stream.read_exact(&mut first).await.expect("begun");
    stream
}

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_session_ends_although_its_client_takes_nothing() {
    for retry_grace in [Duration::ZERO, Duration::from_millis(800)] {
        let mut options = ProxyOptions::trainer("policy");
        options.retry_grace = retry_grace;
        let setup = Setup::with(options, UpstreamKind::Vllm, endless()).await;
        let session = setup.proxy.open_session(spec("s1")).expect("open");
        let stream = stuck(&setup, &format!("/sessions/s1{CHAT}")).await;
        let result = tokio::time::timeout(PATIENCE, session.close()).await.expect("it ends");
        assert_eq!(result.calls.len(), 1);
        assert_eq!(result.calls[0].status, CallStatus::Aborted);
        setup.mock.aborted(1).await;
        drop(stream);
    }
}

#[tokio::test]
async fn a12_the_limit_of_a_whole_call_holds_although_its_client_takes_nothing() {
    for retry_grace in [Duration::ZERO, Duration::from_millis(800)] {
        let mut options = ProxyOptions::stand_alone();
        options.total_timeout = Some(Duration::from_millis(300));
        options.retry_grace = retry_grace;
        let setup = Setup::with(options, UpstreamKind::Vllm, endless()).await;
        let stream = stuck(&setup, CHAT).await;
        let call = &setup.sink.calls(1).await[0];
        assert_eq!(call.status, CallStatus::Timeout);
        assert!(call.error.as_ref().expect("why").contains("total_timeout_secs"));
        setup.mock.aborted(1).await;
        drop(stream);
    }
}

#[tokio::test]
async fn a_client_that_takes_nothing_for_too_long_has_left() {
    let mut options = ProxyOptions::stand_alone();
    options.client_stall = Some(Duration::from_millis(300));
    // A fast machine reads the whole reply while it waits for somebody to come back.
    options.retry_grace = Duration::ZERO;
    let setup = Setup::with(options, UpstreamKind::Vllm, endless()).await;
    let stream = stuck(&setup, CHAT).await;
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::ClientDisconnect);
    setup.mock.aborted(1).await;
    drop(stream);
}
