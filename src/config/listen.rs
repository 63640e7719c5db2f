//! Where the proxy listens.

use std::net::IpAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One address, or several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ListenHost {
    One(String),
    Several(Vec<String>),
}

impl ListenHost {
    /// The addresses, as they are written.
    #[must_use]
    pub fn addresses(&self) -> &[String] {
        match self {
            Self::One(host) => std::slice::from_ref(host),
            Self::Several(hosts) => hosts,
        }
    }

    /// The same without brackets.
    pub fn bare(&self) -> impl Iterator<Item = &str> {
        self.addresses().iter().map(|host| host.trim_start_matches('[').trim_end_matches(']'))
    }
}

/// What is wrong with an address, and what to do.
pub(super) fn problem(host: &str, has_client_token: bool) -> Option<(String, &'static str)> {
    let address = host.parse::<IpAddr>().ok();
    if host != "localhost" && address.is_none() {
        let why =
            if host.is_empty() { "no IP address".to_owned() } else { format!("{host} is not an IP address") };
        return Some((why, "Set it to 127.0.0.1, or to an address of this machine."));
    }
    let is_loopback = address.is_none_or(|address| address.is_loopback());
    (!is_loopback && !has_client_token).then(|| {
        (
            format!("others can reach {host}, and no token is asked of them"),
            "Set proxy.client_token_env to the name of a variable with a token, or listen on 127.0.0.1.",
        )
    })
}
