//! The code of `docs/exports.md` runs, and takes an episode as one.

use lego::record::Call;
use serde_json::json;

use crate::python;
use crate::setup::{Run, sampled};

#[tokio::test]
async fn the_agent_loop_of_the_docs_gives_an_episode_as_one() {
    let mut run = Run::new(2);
    run.trial("v0-g0-0", 0, Some(1.0), json!({}));
    run.trial("v0-g0-1", 0, Some(0.0), json!({}));
    run.trial("v0-g1-0", 0, Some(1.0), json!({}));
    run.trial("v0-g2-0", 0, Some(1.0), json!({}));
    run.trial("v0-g2-1", 0, Some(0.0), json!({}));
    let unsampled = Call { completion_token_ids: None, usage: None, ..sampled("v0-g2-1", 1, &[1], &[2]) };
    run.capture(vec![
        sampled("v0-g2-0", 1, &[1], &[2]),
        unsampled,
        sampled("v0-g0-0", 1, &[1], &[2]),
        sampled("v0-g0-0", 1, &[7], &[8]),
        sampled("v0-g0-1", 1, &[1], &[3]),
        sampled("v0-g1-0", 1, &[1], &[4]),
    ])
    .await;
    let python = python::venv(&["numpy", "pydantic"]);
    let packages = python::alone(&python, &["verl==0.9.1"]);
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/exports.md");
    for form in ["verl", "trl"] {
        let exported = run.export(form, &[]).ok();
        let arguments = [form, docs, packages.to_str().expect("text"), exported.path.to_str().expect("text")];
        assert_eq!(python::script(&python, "export_snippets.py", &arguments).trim(), form);
    }
}
