//! https upstreams whose certificate an authority of the configuration signed.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Method};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::{Timeouts, Upstream};
use crate::record::UpstreamKind;

fn pem(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/fixtures/tls/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(path).expect("fixture")
}

/// An https server that answers every request with `{}`; its URL.
fn server() -> String {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let certificate = CertificateDer::from_pem_slice(&pem("server.pem")).expect("certificate");
    let key = PrivateKeyDer::from_pem_slice(&pem("server.key")).expect("key");
    let config = rustls::ServerConfig::builder().with_no_client_auth();
    let config = Arc::new(config.with_single_cert(vec![certificate], key).expect("they belong together"));
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let url = format!("https://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let connection = rustls::ServerConnection::new(Arc::clone(&config)).expect("server");
            let mut stream = rustls::StreamOwned::new(connection, socket);
            let mut seen = Vec::new();
            let mut piece = [0; 1024];
            // The body that the tests send is the end of the request.
            while !seen.ends_with(b"\"end\"") {
                match stream.read(&mut piece) {
                    Ok(length @ 1..) => seen.extend_from_slice(&piece[..length]),
                    _ => break,
                }
            }
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}");
            let _ = stream.flush();
        }
    });
    url
}

async fn ask(url: &str, authorities: Option<&[u8]>) -> Result<u16, String> {
    let upstream = Upstream::http_trusting(url, UpstreamKind::Vllm, None, Timeouts::default(), authorities)
        .map_err(|error| error.to_string())?;
    let body = Bytes::from_static(b"\"end\"");
    let sent = upstream.send(Method::POST, "/chat/completions", None, &HeaderMap::new(), body).await;
    sent.map(|reply| reply.status.as_u16()).map_err(|error| error.to_string())
}

#[tokio::test]
async fn an_authority_of_the_configuration_is_trusted_and_only_then() {
    let url = server();
    assert_eq!(ask(&url, Some(&pem("authority.pem"))).await, Ok(200));
    let refused = ask(&url, None).await.expect_err("nobody vouches for it");
    assert!(refused.contains("certificate"), "{refused}");
}
