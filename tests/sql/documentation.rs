//! The examples of docs/sql.md.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{rows, store};

#[tokio::test]
async fn every_example_of_the_page_is_answered() {
    let dir = tempfile::tempdir().expect("folder");
    let _writer = store(dir.path()).await;
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/sql.md");
    let page = fs::read_to_string(page).expect("docs/sql.md");
    let blocks = page.split("```").skip(1).step_by(2);
    let queries: Vec<_> = blocks.clone().filter_map(|block| block.strip_prefix("sql\n")).collect();
    assert!(queries.len() >= 8, "{queries:?}");
    for query in queries.iter().flat_map(|block| block.split(";\n")).filter(|query| !query.trim().is_empty())
    {
        assert!(!rows(dir.path(), query).is_empty(), "{query}");
    }
    // Those that begin in a shell are run by one, in a folder with captures of this name.
    let captures = dir.path().join("work/captures");
    fs::create_dir_all(&captures).expect("room");
    let _writer = store(&captures).await;
    let lego = Path::new(env!("CARGO_BIN_EXE_lego")).parent().expect("a folder");
    let path = format!("{}:{}", lego.display(), std::env::var("PATH").expect("set"));
    let commands: Vec<_> = blocks.filter_map(|block| block.strip_prefix("sh\n")).collect();
    let mut ran = 0;
    for command in commands.iter().flat_map(|block| block.lines()).filter(|line| line.starts_with("lego ")) {
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).env("PATH", &path).current_dir(dir.path().join("work"));
        let output = shell.output().expect("sh");
        assert!(output.status.success() && !output.stdout.is_empty(), "{command}: {output:?}");
        ran += 1;
    }
    assert!(ran >= 2, "{commands:?}");
}
