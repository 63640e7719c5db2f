//! The two servers together, as a user runs them: OpenAI's client, `lego proxy`, `lego serve`, duckdb.

#[path = "common/python.rs"]
mod python;

#[test]
fn calls_through_the_proxy_are_read_back_by_duckdb() {
    let captures = tempfile::tempdir().expect("temp");
    let python = python::venv(&["openai", "duckdb", "pytz"]);
    let folder = captures.path().to_string_lossy().into_owned();
    let arguments = [env!("CARGO_BIN_EXE_lego"), "models/lego-tiny", &folder];
    assert!(python::script(&python, "serve_and_proxy.py", &arguments).contains("ok"));
}
