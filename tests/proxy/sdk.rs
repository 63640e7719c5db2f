//! OpenAI's own Python client through the proxy.

#[path = "../common/python.rs"]
mod python;

use lego::record::CallStatus;

use crate::mock::Script;
use crate::setup::Setup;

#[tokio::test]
async fn openais_python_client_streams_and_calls_tools() {
    let python = tokio::task::spawn_blocking(|| python::venv(&["openai"])).await.expect("venv");
    let setup = Setup::stand_alone(Script::default()).await;
    let tools = Script {
        tokens: vec![
            ("<tool_call>", -0.1),
            ("view", -0.2),
            ("{\"path\":", -0.3),
            (" \"a\"}", -0.4),
            ("<|im_end|>", -0.5),
        ],
        has_tool_call: true,
        ..Script::default()
    };
    for (script, expected) in [(Script::default(), "Hello 北京🌍"), (tools, "view {\"path\": \"a\"}")] {
        setup.mock.set(script);
        let url = format!("http://{}/v1", setup.address);
        let python = python.clone();
        let run = tokio::task::spawn_blocking(move || python::script(&python, "openai_client.py", &[&url]));
        let output = run.await.expect("ran");
        for line in output.lines().filter(|line| line.starts_with("stream")) {
            assert!(line.ends_with(expected), "{output}");
        }
        assert_eq!(output.lines().count(), 3, "{output}");
    }
    let calls = setup.sink.calls(6).await;
    for call in calls {
        assert_eq!(call.status, CallStatus::Ok);
        let sampled = call.completion_token_ids.expect("ids").len();
        assert_eq!(call.completion_logprobs.expect("log-probs").len(), sampled);
        assert_eq!(call.usage.expect("usage").completion_tokens, sampled as u64);
    }
}
