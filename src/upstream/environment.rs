//! The proxies that the environment names (`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`). `reqwest` reads and uses them.

use super::transport::UpstreamError;
use super::url::BaseUrl;

/// Schemes of proxies that can be used.
const SCHEMES: [&str; 6] = ["http", "https", "socks4", "socks4a", "socks5", "socks5h"];

/// The first variable that holds for this URL: never one for this machine.
pub(super) fn proxy_variable(base: &BaseUrl, is_set: impl Fn(&str) -> bool) -> Option<&'static str> {
    let of_scheme =
        if base.is_https() { ["HTTPS_PROXY", "https_proxy"] } else { ["HTTP_PROXY", "http_proxy"] };
    let mut names = of_scheme.into_iter().chain(["ALL_PROXY", "all_proxy"]);
    names.find(|name| !base.is_loopback() && is_set(name))
}

/// True if the environment has this variable and it is not empty.
pub(super) fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty())
}

/// Refuses a proxy that cannot be used: `reqwest` would go without one, or fail with every call.
pub(super) fn check(variable: &'static str) -> Result<(), UpstreamError> {
    check_value(variable, &std::env::var_os(variable).unwrap_or_default().to_string_lossy())
}

fn check_value(variable: &'static str, value: &str) -> Result<(), UpstreamError> {
    let value = value.trim();
    // The rest may hold a password.
    let scheme = value.split_once("://").map_or("http", |(scheme, _)| scheme);
    let is_known = SCHEMES.iter().any(|known| known.eq_ignore_ascii_case(scheme));
    let whole = if value.contains("://") { value.to_owned() } else { format!("http://{value}") };
    let has_host =
        whole.parse::<http::Uri>().is_ok_and(|uri| uri.host().is_some_and(|host| !host.is_empty()));
    if is_known && has_host {
        return Ok(());
    }
    let why = match is_known {
        false => format!("its scheme {scheme:?} is none of {}", SCHEMES.join(", ")),
        true => "it is not a URL with a host".to_owned(),
    };
    Err(UpstreamError::Proxy { variable, why })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environments_proxies_are_for_hosted_upstreams_and_never_for_this_machine() {
        let goes = |url: &str, set: &'static str| {
            proxy_variable(&BaseUrl::parse(url).expect("URL"), |name| name == set).is_some()
        };
        for set in ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"] {
            assert!(goes("http://engine.example:8000", set), "{set}");
            for loopback in [
                "http://127.0.0.1:8000",
                "http://localhost:1",
                "http://[::1]:1",
                "http://0.0.0.0:1",
                "http://[::]:1",
                "http://[::ffff:127.0.0.1]:1",
                "http://engine.localhost:1",
            ] {
                assert!(!goes(loopback, set), "{set} {loopback}");
            }
        }
        assert!(!goes("http://engine.example", "NO_PROXY"));
    }

    #[test]
    fn a_proxy_that_cannot_be_used_is_refused_with_its_variable_and_no_secret() {
        for value in [
            "http://proxy:3128",
            "HTTPS://user:pass@proxy",
            "proxy:3128",
            "socks5://127.0.0.1:1080",
            "socks5h://user:pass@proxy:1080",
            "socks4a://proxy",
        ] {
            assert!(check_value("ALL_PROXY", value).is_ok(), "{value}");
        }
        for (value, why) in [
            ("ftp://user:canary@proxy", "\"ftp\" is none of http"),
            ("socks6://proxy", "socks5h"),
            ("http://", "no"),
            ("http://a b", "not a URL"),
        ] {
            let error = check_value("ALL_PROXY", value).expect_err(value).to_string();
            assert!(error.contains("ALL_PROXY") && error.contains(why), "{error}");
            assert!(error.contains("unset it") && !error.contains("canary"), "{error}");
        }
    }
}
