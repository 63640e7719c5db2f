//! The proxies that the environment names (`http_proxy`, `https_proxy`, `all_proxy`, and what `no_proxy` leaves out), read
//! as curl and Python read them: a name in lower case counts before the same one in capitals, even if it is empty, which
//! says that there is no proxy. `HTTP_PROXY` is not looked at where `REQUEST_METHOD` is set: within CGI a client's header
//! `Proxy` would set it. `no_proxy` may name ports too, as it may for Python and Go.

use hyper_util::client::proxy::matcher::Matcher;

use super::transport::UpstreamError;
use super::url::BaseUrl;

/// Schemes of proxies that can be used.
const SCHEMES: [&str; 6] = ["http", "https", "socks4", "socks4a", "socks5", "socks5h"];

/// A proxy that holds for an upstream.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) variable: &'static str,
    pub(super) proxy: reqwest::Proxy,
}

/// The value of a variable of this process; `None`: it is not set.
pub(super) fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// The proxy for this URL: never one for this machine.
///
/// # Errors
/// It cannot be used: a client would go without one, or fail with every call.
pub(super) fn proxy_for(
    base: &BaseUrl,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<Found>, UpstreamError> {
    if base.is_loopback() {
        return Ok(None);
    }
    let own = if base.is_https() { ["https_proxy", "HTTPS_PROXY"] } else { ["http_proxy", "HTTP_PROXY"] };
    let is_of_a_client = |name: &str| name == "HTTP_PROXY" && variable("REQUEST_METHOD").is_some();
    let set = |names: [&'static str; 2]| {
        names.into_iter().filter(|name| !is_of_a_client(name)).find_map(|name| Some((name, variable(name)?)))
    };
    let Some((name, value)) = set(own).or_else(|| set(["all_proxy", "ALL_PROXY"])) else {
        return Ok(None);
    };
    let excluded = set(["no_proxy", "NO_PROXY"]).is_some_and(|(_, list)| is_excluded(base, &list));
    if value.trim().is_empty() || excluded {
        return Ok(None);
    }
    usable(name, value.trim()).map(|proxy| Some(Found { variable: name, proxy }))
}

/// True if a list of hosts, networks and domains names this one.
fn is_excluded(base: &BaseUrl, list: &str) -> bool {
    let (host, port) = base.host_port();
    let entries = list.split(',').map(str::trim).filter_map(|entry| {
        let named = entry.rsplit_once(':').filter(|(host, _)| !host.contains(':') || host.ends_with(']'));
        let named = named.and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
        let entry = match named {
            Some((host, named)) => (named == port).then_some(host)?,
            None => entry,
        };
        Some(entry.trim_start_matches('[').trim_end_matches(']'))
    });
    let list = entries.collect::<Vec<_>>().join(",");
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let Ok(uri) = format!("http://{host}/").parse::<http::Uri>() else {
        return false;
    };
    // What it would be excluded from is of no matter.
    Matcher::builder().all("http://proxy").no(list).build().intercept(&uri).is_none()
}

fn usable(variable: &'static str, value: &str) -> Result<reqwest::Proxy, UpstreamError> {
    // The rest may hold a password.
    let scheme = value.split_once("://").map_or("http", |(scheme, _)| scheme);
    let is_known = SCHEMES.iter().any(|known| known.eq_ignore_ascii_case(scheme));
    let whole = if value.contains("://") { value.to_owned() } else { format!("http://{value}") };
    let has_host =
        whole.parse::<http::Uri>().is_ok_and(|uri| uri.host().is_some_and(|host| !host.is_empty()));
    let refused = |why: String| UpstreamError::Proxy { variable, why };
    if !is_known {
        return Err(refused(format!("its scheme {scheme:?} is none of {}", SCHEMES.join(", "))));
    }
    let proxy = reqwest::Proxy::all(&whole).ok().filter(|_| has_host);
    proxy.ok_or_else(|| refused("it is not a URL with a host".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variable whose proxy is used.
    fn used(url: &str, set: &[(&str, &str)]) -> Option<&'static str> {
        let base = BaseUrl::parse(url).expect("URL");
        let variable =
            |name: &str| set.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned());
        proxy_for(&base, variable).expect("usable").map(|found| found.variable)
    }

    const P: &str = "http://proxy:3128";

    #[test]
    fn the_environments_proxies_are_for_hosted_upstreams_and_never_for_this_machine() {
        for set in ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"] {
            assert_eq!(used("http://engine.example:8000", &[(set, P)]), Some(set));
            for loopback in [
                "http://127.0.0.1:8000",
                "http://localhost:1",
                "http://[::1]:1",
                "http://0.0.0.0:1",
                "http://[::]:1",
                "http://[::ffff:127.0.0.1]:1",
                "http://engine.localhost:1",
            ] {
                assert_eq!(used(loopback, &[(set, P)]), None, "{set} {loopback}");
            }
        }
        for set in ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"] {
            assert_eq!(used("https://engine.example", &[(set, P)]), Some(set));
        }
        assert_eq!(used("http://engine.example", &[("https_proxy", P), ("NO_PROXY", P)]), None);
        assert_eq!(used("https://engine.example", &[("http_proxy", P), ("HTTP_PROXY", P)]), None);
    }

    #[test]
    fn a_name_in_lower_case_counts_first_and_an_empty_one_says_that_there_is_none() {
        for (url, lower, upper) in [
            ("http://h", "http_proxy", "HTTP_PROXY"),
            ("https://h", "https_proxy", "HTTPS_PROXY"),
            ("https://h", "all_proxy", "ALL_PROXY"),
        ] {
            assert_eq!(used(url, &[(upper, P), (lower, P)]), Some(lower));
            assert_eq!(used(url, &[(upper, P), (lower, " ")]), None, "{lower}");
            assert_eq!(used(url, &[(upper, ""), (lower, P)]), Some(lower));
            assert_eq!(used(url, &[(upper, "")]), None);
        }
        // A scheme's own counts before the one for all.
        assert_eq!(used("https://h", &[("all_proxy", P), ("HTTPS_PROXY", P)]), Some("HTTPS_PROXY"));
        assert_eq!(used("https://h", &[("all_proxy", P), ("HTTPS_PROXY", "")]), None);
    }

    #[test]
    fn in_cgi_only_what_a_client_can_set_is_ignored() {
        let cgi = ("REQUEST_METHOD", "POST");
        assert_eq!(used("http://h", &[cgi, ("HTTP_PROXY", P)]), None);
        assert_eq!(used("http://h", &[cgi, ("HTTP_PROXY", P), ("ALL_PROXY", P)]), Some("ALL_PROXY"));
        assert_eq!(used("http://h", &[cgi, ("HTTP_PROXY", P), ("http_proxy", P)]), Some("http_proxy"));
        assert_eq!(used("https://h", &[cgi, ("HTTPS_PROXY", P)]), Some("HTTPS_PROXY"));
    }

    #[test]
    fn what_no_proxy_names_is_reached_directly() {
        for (host, list, is_direct) in [
            ("engine.example", "engine.example", true),
            ("engine.example", "other, .example", true),
            ("engine.example", "example", true),
            ("engine.example", "ngine.example", false),
            ("engine.example", "*", true),
            ("10.1.2.3", "10.0.0.0/8", true),
            ("10.1.2.3", "10.1.2.4", false),
            ("[fd00::1]", "fd00::/8", true),
            ("[fd00::1]:90", "[fd00::1]:90", true),
            ("[fd00::1]:90", "[fd00::1]", true),
            ("[fd00::1]:90", "[fd00::1]:91", false),
            ("engine.example:8000", "engine.example:8000", true),
            ("engine.example:8000", "engine.example:80", false),
            ("engine.example", "engine.example:80", true),
            ("engine.example", "", false),
        ] {
            let url = format!("http://{host}");
            for name in ["no_proxy", "NO_PROXY"] {
                let used = used(&url, &[("HTTP_PROXY", P), (name, list)]);
                assert_eq!(used.is_none(), is_direct, "{host} {name}={list}");
            }
        }
        let both =
            |lower, upper| used("http://h", &[("http_proxy", P), ("no_proxy", lower), ("NO_PROXY", upper)]);
        assert_eq!(
            (both("h", "other"), both("other", "h"), both("", "h")),
            (None, Some("http_proxy"), Some("http_proxy"))
        );
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
            assert!(usable("ALL_PROXY", value).is_ok(), "{value}");
        }
        for (value, why) in [
            ("ftp://user:canary@proxy", "\"ftp\" is none of http"),
            ("socks6://proxy", "socks5h"),
            ("http://", "no"),
            ("http://a b", "not a URL"),
        ] {
            let error = usable("ALL_PROXY", value).expect_err(value).to_string();
            assert!(error.contains("ALL_PROXY") && error.contains(why), "{error}");
            assert!(error.contains("unset it") && !error.contains("canary"), "{error}");
        }
    }
}
