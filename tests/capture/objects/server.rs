//! moto, an S3 server, and in front of it one that fails as it is told and counts what it forwards.
//!
//! Google's XML protocol is S3's but for its credentials and for how it says that nothing may be there yet.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::HeaderValue;
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::watch;

use crate::python;

/// One a test process.
fn moto() -> u16 {
    static SERVER: OnceLock<(Mutex<Child>, u16)> = OnceLock::new();
    let start = || {
        let python = python::venv(&["moto[server]"]);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/s3_server.py");
        let mut command = Command::new(python);
        command.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("Python starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("piped");
        BufReader::new(stdout).read_line(&mut line).expect("a port");
        (Mutex::new(child), line.trim().parse().expect("a port"))
    };
    SERVER.get_or_init(start).1
}

/// What goes wrong with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The answer of a server that failed.
    Internal,
    SlowDown,
    Denied,
    NoBucket,
    /// The connection ends before the request was forwarded.
    DropBefore,
    /// It was forwarded, and nobody hears of the answer.
    DropAfter,
    /// Half of the answer's body.
    Truncate,
    /// Half of the request's body arrives, as if it were all.
    TruncateUpload,
    /// The answer comes late.
    Late,
    /// The answer has an ETag that is no MD5, as that of an encrypted object.
    OtherTag,
    /// It was forwarded, and the answer waits until the gate opens.
    Gate,
}

pub struct Rule {
    pub method: Method,
    /// The path has this in it.
    pub path: &'static str,
    /// So many requests; then the rule is over.
    pub times: usize,
    pub fault: Fault,
}

/// A request that was forwarded.
#[derive(Debug, Clone)]
pub struct Seen {
    pub method: Method,
    pub path: String,
    pub received: usize,
    pub range: Option<String>,
}

#[derive(Default)]
struct State {
    rules: Mutex<VecDeque<Rule>>,
    seen: Mutex<Vec<Seen>>,
    /// All requests fail so.
    outage: Mutex<Option<Fault>>,
    hits: Mutex<usize>,
    /// Requests that are being answered, and the most there were at once.
    answering: Mutex<(usize, usize)>,
}

/// A bucket behind faults.
pub struct Server {
    state: Arc<State>,
    pub gate: watch::Sender<bool>,
    /// Requests that wait for the gate.
    pub waiting: watch::Receiver<usize>,
    address: SocketAddr,
    pub bucket: String,
    scheme: &'static str,
}

/// As [`Server::ask`] and clients of Google's protocol do not know how to make it. moto looks at its form alone.
const SIGNED: &str =
    "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x";

impl Server {
    pub async fn start() -> Self {
        Self::of("s3").await
    }

    /// Reached by URLs of this scheme.
    pub async fn of(scheme: &'static str) -> Self {
        let port = tokio::task::spawn_blocking(moto).await.expect("moto");
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let state = Arc::new(State::default());
        let (gate, opened) = watch::channel(true);
        let (waits, waiting) = watch::channel(0);
        let waits = Arc::new(waits);
        let for_task = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (state, opened, waits) = (Arc::clone(&for_task), opened.clone(), Arc::clone(&waits));
                let serve = hyper::service::service_fn(move |request| {
                    let (state, opened, waits) = (Arc::clone(&state), opened.clone(), Arc::clone(&waits));
                    async move {
                        {
                            let (now, most) = &mut *state.answering.lock().expect("whole");
                            *now += 1;
                            *most = (*now).max(*most);
                        }
                        let answered = answer(Arc::clone(&state), opened, waits, port, request).await;
                        state.answering.lock().expect("whole").0 -= 1;
                        answered
                    }
                });
                let io = hyper_util::rt::TokioIo::new(stream);
                tokio::spawn(async move {
                    // A dropped connection is an error here.
                    let _ = hyper::server::conn::http1::Builder::new().serve_connection(io, serve).await;
                });
            }
        });
        let bucket = format!("bucket{}", uuid::Uuid::new_v4().simple());
        let server = Self { state, gate, waiting, address, bucket, scheme };
        server.ask(Method::PUT, "", None).await;
        server.state.seen.lock().expect("whole").clear();
        server
    }

    pub fn url(&self, prefix: &str) -> String {
        format!("{}://{}/{prefix}", self.scheme, self.bucket)
    }

    /// What a process needs to reach it.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let account = serde_json::json!({
            "gcs_base_url": format!("http://{}", self.address), "disable_oauth": true,
            "client_email": "", "private_key": "", "private_key_id": "",
        });
        vec![
            ("AWS_ENDPOINT_URL", format!("http://{}", self.address)),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_ACCESS_KEY_ID", "AKIACANARYKEYID".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "canary-secret".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("GOOGLE_SERVICE_ACCOUNT_KEY", account.to_string()),
            ("no_proxy", "127.0.0.1".to_owned()),
        ]
    }

    pub fn fail(&self, method: Method, path: &'static str, times: usize, fault: Fault) {
        let rule = Rule { method, path, times, fault };
        self.state.rules.lock().expect("whole").push_back(rule);
    }

    pub fn outage(&self, fault: Option<Fault>) {
        *self.state.outage.lock().expect("whole") = fault;
    }

    /// Rules that were not needed are over.
    pub fn forget(&self) {
        self.state.rules.lock().expect("whole").clear();
    }

    /// Requests that failed as told so far.
    pub fn hits(&self) -> usize {
        *self.state.hits.lock().expect("whole")
    }

    /// The most requests that were answered at once since this was last asked.
    pub fn most_at_once(&self) -> usize {
        std::mem::take(&mut self.state.answering.lock().expect("whole").1)
    }

    /// What was forwarded since this was last asked.
    pub fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.state.seen.lock().expect("whole"))
    }

    /// Asks the server itself, without faults.
    async fn ask(&self, method: Method, path: &str, body: Option<Bytes>) -> reqwest::Response {
        let port = tokio::task::spawn_blocking(moto).await.expect("moto");
        let url = format!("http://127.0.0.1:{port}/{}{path}", self.bucket);
        let request = client().request(method, url).header("authorization", SIGNED);
        request.body(body.unwrap_or_default()).send().await.expect("moto answers")
    }

    /// The names of all objects.
    pub async fn keys(&self) -> Vec<String> {
        let text = self.ask(Method::GET, "?list-type=2", None).await.text().await.expect("text");
        let keys =
            text.split("<Key>").skip(1).map(|rest| rest.split("</Key>").next().expect("an end").to_owned());
        keys.collect()
    }

    pub async fn get(&self, key: &str) -> Bytes {
        self.ask(Method::GET, &format!("/{key}"), None).await.bytes().await.expect("an object")
    }

    pub async fn put(&self, key: &str, body: impl Into<Bytes>) {
        let response = self.ask(Method::PUT, &format!("/{key}"), Some(body.into())).await;
        assert!(response.status().is_success(), "{response:?}");
    }

    pub async fn delete(&self, key: &str) {
        self.ask(Method::DELETE, &format!("/{key}"), None).await;
    }
}

fn client() -> reqwest::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().no_proxy().build().expect("client")
}

type Body = http_body_util::combinators::BoxBody<Bytes, std::io::Error>;

fn whole(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| match never {}).boxed()
}

fn told(status: StatusCode, code: &str) -> Response<Body> {
    let text = format!(
        "<Error><Code>{code}</Code><AWSAccessKeyId>AKIACANARYKEYID</AWSAccessKeyId><Message>canary</Message></Error>"
    );
    Response::builder().status(status).body(whole(text.into())).expect("a response")
}

/// The fault of a request, if it has one.
fn fault(state: &State, method: &Method, path: &str) -> Option<Fault> {
    let fault = state.outage.lock().expect("whole").or_else(|| {
        let mut rules = state.rules.lock().expect("whole");
        let rule = rules.iter_mut().find(|r| r.times > 0 && r.method == *method && path.contains(r.path))?;
        rule.times -= 1;
        Some(rule.fault)
    });
    *state.hits.lock().expect("whole") += usize::from(fault.is_some());
    fault
}

async fn answer(
    state: Arc<State>,
    mut opened: watch::Receiver<bool>,
    waits: Arc<watch::Sender<usize>>,
    port: u16,
    request: Request<Incoming>,
) -> Result<Response<Body>, std::io::Error> {
    let broken = || std::io::Error::other("dropped");
    let (head, body) = request.into_parts();
    let mut body = body.collect().await.map_err(|_| broken())?.to_bytes();
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let fault = fault(&state, &head.method, &path);
    match fault {
        Some(Fault::Internal) => return Ok(told(StatusCode::INTERNAL_SERVER_ERROR, "InternalError")),
        Some(Fault::SlowDown) => return Ok(told(StatusCode::SERVICE_UNAVAILABLE, "SlowDown")),
        Some(Fault::Denied) => return Ok(told(StatusCode::FORBIDDEN, "AccessDenied")),
        Some(Fault::NoBucket) => return Ok(told(StatusCode::NOT_FOUND, "NoSuchBucket")),
        Some(Fault::DropBefore) => return Err(broken()),
        Some(Fault::TruncateUpload) => body.truncate(body.len() / 2),
        Some(Fault::Late) => tokio::time::sleep(Duration::from_millis(700)).await,
        _ => {}
    }
    let mut headers = head.headers.clone();
    headers.remove("content-length");
    if headers.get("authorization").is_none_or(|signed| !signed.as_bytes().starts_with(b"AWS4")) {
        headers.insert("authorization", HeaderValue::from_static(SIGNED));
    }
    if headers.remove("x-goog-if-generation-match").is_some_and(|generation| generation == "0") {
        headers.insert("if-none-match", HeaderValue::from_static("*"));
    }
    let url = format!("http://127.0.0.1:{port}{path}");
    let forwarded = client().request(head.method.clone(), url).headers(headers).body(body).send().await;
    let (answer, mut received) = match forwarded {
        Ok(answer) => (answer.status(), answer),
        Err(_) => return Err(broken()),
    };
    let headers = received.headers().clone();
    let mut bytes = Vec::new();
    while let Some(piece) = received.chunk().await.map_err(|_| broken())? {
        bytes.extend_from_slice(&piece);
    }
    let range = head.headers.get("range").and_then(|range| range.to_str().ok()).map(str::to_owned);
    let seen = Seen { method: head.method.clone(), path, received: bytes.len(), range };
    state.seen.lock().expect("whole").push(seen);
    let mut response = Response::builder().status(answer);
    for (name, value) in
        headers.iter().filter(|(name, _)| *name != "transfer-encoding" && *name != "connection")
    {
        let is_other = fault == Some(Fault::OtherTag) && *name == "etag";
        response = if is_other { response.header(name, "\"another\"") } else { response.header(name, value) };
    }
    let body = match fault {
        Some(Fault::DropAfter) => return Err(broken()),
        Some(Fault::Gate) => {
            waits.send_modify(|waits| *waits += 1);
            opened.wait_for(|open| *open).await.map_err(|_| broken())?;
            whole(bytes.into())
        }
        Some(Fault::Truncate) if bytes.len() > 1 => {
            let half = Bytes::from(bytes).slice(..1);
            let pieces = [Ok(Frame::data(half)), Err(broken())];
            StreamBody::new(futures_util::stream::iter(pieces)).boxed()
        }
        _ => whole(bytes.into()),
    };
    Ok(response.body(body).expect("a response"))
}
