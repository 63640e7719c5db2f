//! The HTTP client of object storage: that of hosted upstreams, with HTTP/1 and rustls alone. `object_store`'s own one
//! would bring HTTP/2 into every client of the process.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use async_trait::async_trait;
use http_body_util::BodyExt as _;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};

/// Time for a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest silence within a reply.
const SILENCE: Duration = Duration::from_secs(30);
/// Time for a request with its reply. A piece is at most 8 MiB long.
const REQUEST: Duration = Duration::from_secs(120);

/// Makes clients.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        // A provider may have been installed already: any will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let allows_http = options.get_config_value(&ClientConfigKey::AllowHttp);
        let client = reqwest::Client::builder()
            .connect_timeout(CONNECT)
            .read_timeout(SILENCE)
            .timeout(REQUEST)
            .redirect(reqwest::redirect::Policy::none())
            .https_only(allows_http.is_none_or(|allows| allows != "true"))
            .build()
            .map_err(|error| object_store::Error::Generic { store: "HTTP", source: Box::new(error) })?;
        Ok(HttpClient::new(Service(client)))
    }
}

#[derive(Debug)]
struct Service(reqwest::Client);

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (mut head, body) = request.into_parts();
        let length = body.content_length();
        if length > 0 {
            // Requests to Azure and Google have it already, and servers refuse two.
            head.headers.insert(http::header::CONTENT_LENGTH, length.into());
        }
        let mut wanted = self.0.request(head.method, head.uri.to_string()).headers(head.headers);
        if length > 0 {
            wanted = wanted.body(reqwest::Body::wrap(body));
        }
        let response = wanted.send().await.map_err(failed)?;
        let (head, body) = http::Response::<reqwest::Body>::from(response).into_parts();
        Ok(HttpResponse::from_parts(head, HttpResponseBody::new(body.map_err(failed))))
    }
}

/// What went wrong, without the URL, which may be signed.
fn failed(error: reqwest::Error) -> HttpError {
    let error = error.without_url();
    let kind = if error.is_timeout() {
        HttpErrorKind::Timeout
    } else if error.is_connect() {
        HttpErrorKind::Connect
    } else {
        broken(&error)
    };
    HttpError::new(kind, error)
}

fn broken(error: &reqwest::Error) -> HttpErrorKind {
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<hyper::Error>()
            && (error.is_closed() || error.is_incomplete_message() || error.is_body_write_aborted())
        {
            return HttpErrorKind::Request;
        }
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return match error.kind() {
                io::ErrorKind::TimedOut => HttpErrorKind::Timeout,
                _ => HttpErrorKind::Interrupted,
            };
        }
        source = error.source();
    }
    HttpErrorKind::Unknown
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_request_has_one_length_whoever_said_it() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let url = format!("http://{}/object", listener.local_addr().expect("bound"));
        let options = ClientOptions::new().with_allow_http(true);
        let client = Connector.connect(&options).expect("a client");
        for (is_said, body) in [(true, "five!"), (false, "five!"), (true, "")] {
            let mut request = http::Request::put(&url);
            if is_said {
                request = request.header("content-length", body.len());
            }
            let request = request.body(body.to_owned().into()).expect("a request");
            let serve = async {
                let (mut socket, _) = listener.accept().await.expect("a connection");
                let mut seen = Vec::new();
                while !String::from_utf8_lossy(&seen).contains(&format!("\r\n\r\n{body}")) {
                    socket.read_buf(&mut seen).await.expect("a request");
                }
                socket.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n").await.expect("sent");
                String::from_utf8(seen).expect("text").to_lowercase()
            };
            let (answered, seen) = tokio::join!(client.execute(request), serve);
            assert!(answered.expect("answered").status().is_success());
            assert_eq!(seen.matches("content-length:").count(), 1, "{seen}");
            assert!(seen.contains(&format!("content-length: {}", body.len())), "{seen}");
        }
    }
}
