//! The upstream's base URL, however it is spelled.

use std::net::IpAddr;

use http::Uri;
use http::uri::{Authority, Scheme};

/// A base URL that cannot be used. The message says why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("upstream URL {url:?} is not usable: {reason}")]
pub struct InvalidUrl {
    /// Without its user part.
    url: String,
    reason: &'static str,
}

/// Scheme, host and the path before `/chat/completions`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseUrl {
    scheme: Scheme,
    authority: Authority,
    /// Ends in a version segment such as `/v1`, without a slash at the end.
    path: String,
}

impl BaseUrl {
    /// Reads a base URL. `http://h`, `http://h/`, `http://h/v1`, `http://h/prefix/v1/`, `http://h/api/v4` and
    /// `http://h/v1/chat/completions` all work.
    ///
    /// # Errors
    /// [`InvalidUrl`] for anything but http and https, for user parts and queries (they would hide a secret in a URL).
    pub fn parse(text: &str) -> Result<Self, InvalidUrl> {
        let shown = match text.split_once('@') {
            Some((before, after)) => {
                let scheme = before.split_once("://").map_or("", |(scheme, _)| scheme);
                format!("{scheme}://…@{after}")
            }
            None => text.split('?').next().unwrap_or_default().to_owned(),
        };
        let invalid = |reason| InvalidUrl { url: shown.clone(), reason };
        let uri: Uri = text.trim().parse().map_err(|_| invalid("it is not a URL"))?;
        let scheme = uri.scheme().cloned().filter(|s| *s == Scheme::HTTP || *s == Scheme::HTTPS);
        let scheme = scheme.ok_or_else(|| invalid("it must begin with http:// or https://"))?;
        let authority = uri.authority().cloned().ok_or_else(|| invalid("it has no host"))?;
        if authority.as_str().contains('@') {
            return Err(invalid(
                "it has a user part: put the key into an environment variable (upstream_api_key_env)",
            ));
        }
        if uri.query().is_some() {
            return Err(invalid(
                "it has a query: put keys into an environment variable (upstream_api_key_env)",
            ));
        }
        let mut path = uri.path().trim_end_matches('/').to_owned();
        for route in ["/chat/completions", "/completions", "/messages", "/responses", "/models", "/generate"]
        {
            if let Some(base) = path.strip_suffix(route) {
                path = base.to_owned();
                break;
            }
        }
        let last = path.rsplit('/').next().unwrap_or_default();
        let is_version = last.strip_prefix('v').is_some_and(|n| {
            n.starts_with(|c: char| c.is_ascii_digit()) && n.chars().all(|c| c.is_ascii_alphanumeric())
        });
        if !is_version {
            path.push_str("/v1");
        }
        Ok(Self { scheme, authority, path })
    }

    /// The URL of a route such as `/chat/completions`; `/../tokenize` lies beside the version segment.
    ///
    /// # Errors
    /// When `query` has bytes that a URL cannot have.
    pub fn join(&self, route: &str, query: Option<&str>) -> Result<Uri, http::Error> {
        let query = query.map_or(String::new(), |query| format!("?{query}"));
        Uri::builder()
            .scheme(self.scheme.clone())
            .authority(self.authority.clone())
            .path_and_query(format!("{}{query}", below(&self.path, route)))
            .build()
    }

    /// True for https.
    #[must_use]
    pub fn is_https(&self) -> bool {
        self.scheme == Scheme::HTTPS
    }

    /// Host without brackets, and port.
    #[must_use]
    pub fn host_port(&self) -> (&str, u16) {
        let host = self.authority.host().trim_start_matches('[').trim_end_matches(']');
        let default = if self.is_https() { 443 } else { 80 };
        (host, self.authority.port_u16().unwrap_or(default))
    }

    /// Value of the `Host` header.
    #[must_use]
    pub fn authority(&self) -> &str {
        self.authority.as_str()
    }

    /// True if the host is this machine, however it is written: such calls never go through a proxy of the environment.
    /// What listens on an unspecified address (`0.0.0.0`) is reached here by that address too.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        // It also reads addresses as the system does: `127.1` is `127.0.0.1`.
        let url = reqwest::Url::parse(&format!("http://{}", self.authority)).ok();
        let Some(host) = url.as_ref().and_then(reqwest::Url::host_str) else {
            return false;
        };
        let name = host.trim_end_matches('.');
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        let address = address.map(|address| address.to_canonical());
        name == "localhost"
            || name.ends_with(".localhost")
            || address.is_ok_and(|address| address.is_loopback() || address.is_unspecified())
    }
}

/// The path of a route below a base path that ends in a version segment.
pub(super) fn below(base: &str, route: &str) -> String {
    match route.strip_prefix("/..") {
        Some(beside) => format!("{}{beside}", base.rsplit_once('/').map_or("", |(parent, _)| parent)),
        None => format!("{base}{route}"),
    }
}

impl std::fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}://{}{}", self.scheme, self.authority, self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn g02_every_spelling_of_a_base_url_ends_at_the_same_route() {
        for (base, expected) in [
            ("http://h", "http://h/v1/chat/completions"),
            ("http://h/", "http://h/v1/chat/completions"),
            ("http://h/v1", "http://h/v1/chat/completions"),
            ("http://h/v1/", "http://h/v1/chat/completions"),
            ("http://h/prefix", "http://h/prefix/v1/chat/completions"),
            ("http://h/prefix/v1/", "http://h/prefix/v1/chat/completions"),
            ("https://h:8443/api/v4", "https://h:8443/api/v4/chat/completions"),
            ("http://h/v1beta", "http://h/v1beta/chat/completions"),
            ("http://h/v1/chat/completions", "http://h/v1/chat/completions"),
            ("http://[::1]:8000/v1", "http://[::1]:8000/v1/chat/completions"),
        ] {
            let url = BaseUrl::parse(base).expect(base).join("/chat/completions", None);
            assert_eq!(url.expect("URL").to_string(), expected, "{base}");
        }
        let url = BaseUrl::parse("http://h").expect("URL").join("/models", Some("a=1")).expect("URL");
        assert_eq!(url.to_string(), "http://h/v1/models?a=1");
        let url = BaseUrl::parse("http://h/prefix/v1").expect("URL").join("/../tokenize", None).expect("URL");
        assert_eq!(url.to_string(), "http://h/prefix/tokenize");
    }

    #[test]
    fn this_machine_is_known_by_all_its_names() {
        for (host, is_own) in [
            ("localhost:1", true),
            ("LocalHost", true),
            ("foo.localhost", true),
            ("a.b.LOCALHOST.:1", true),
            ("127.0.0.1:1", true),
            ("127.8.9.1", true),
            ("127.1", true),
            ("0.0.0.0:8000", true),
            ("[::1]:1", true),
            ("[::]:1", true),
            ("[::ffff:127.0.0.1]:1", true),
            ("[::ffff:0.0.0.0]", true),
            ("[::ffff:10.0.0.1]", false),
            ("10.0.0.1", false),
            ("example.org", false),
            ("localhost.example.org", false),
            ("notlocalhost", false),
        ] {
            let url = BaseUrl::parse(&format!("http://{host}")).expect(host);
            assert_eq!(url.is_loopback(), is_own, "{host}");
        }
    }

    #[test]
    fn g04_a_url_with_a_secret_is_refused_without_repeating_it() {
        for url in ["http://user:canary@h/v1", "http://h/v1?key=canary"] {
            let error = BaseUrl::parse(url).expect_err(url).to_string();
            assert!(!error.contains("canary"), "{error}");
            assert!(error.contains("upstream_api_key_env"), "{error}");
        }
        assert!(BaseUrl::parse("ftp://h").is_err());
        assert!(BaseUrl::parse("h:80").is_err());
    }
}
