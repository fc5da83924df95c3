//! `Greeting`: what a person who starts a server in a terminal wants to know.

use std::fmt;
use std::io::{Write, stderr};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::logs;
use crate::progress;

/// Addresses of this machine that are shown.
const ADDRESSES_MAX: usize = 4;

/// Facts of a server that listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Where this machine reaches it.
    pub url: String,
    /// Whether other machines reach it.
    pub is_open: bool,
    /// Where they do.
    pub network: Vec<String>,
    pub has_keys: bool,
    /// The models that it serves, by the names that requests give. The first one is used in examples.
    pub models: Vec<String>,
}

impl Greeting {
    /// Of a server that listens on `address`.
    pub fn new(scheme: &str, address: SocketAddr, has_keys: bool, models: Vec<String>) -> Self {
        let is_open = !address.ip().is_loopback();
        Self { url: local_url(scheme, address), is_open, network: network_urls(scheme, address), has_keys, models }
    }

    /// Writes it where a person reads it, else nothing.
    pub fn print(&self) {
        tell(&self.to_string());
    }
}

impl fmt::Display for Greeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { url, is_open, network, has_keys, models } = self;
        let (model, key) =
            (models.first().map_or("MODEL", String::as_str), if *has_keys { "YOUR_KEY" } else { "none" });
        match &models[..] {
            [] => writeln!(f, "consort listens on {url}\n")?,
            models => writeln!(f, "consort serves {} on {url}\n", models.join(", "))?,
        }
        writeln!(f, "  chat page   {url}/")?;
        writeln!(f, "  API         {url}/v1 (OpenAI's; Anthropic's and Ollama's on {url})")?;
        for (index, url) in network.iter().enumerate() {
            writeln!(f, "  {}{url}", if index == 0 { "network     " } else { "            " })?;
        }
        writeln!(f, "  a client    export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}")?;
        writeln!(f, "              openai api chat.completions.create -m {model} -g user \"Hello\"\n")?;
        if *is_open && !has_keys {
            writeln!(
                f,
                "warning: no API key is set, so everybody on this network can use it: --api-key KEY sets one\n"
            )?;
        }
        write!(f, "Ctrl-C ends it; -v shows requests")
    }
}

/// Tells a person that a model can answer, and how long that took.
pub fn tell_ready(model: &str, took: Duration, context: usize) {
    tell(&ready(model, took, context));
}

fn ready(model: &str, took: Duration, context: usize) -> String {
    format!("{model} is ready after {:.1} s, with a context of {context} tokens", took.as_secs_f64())
}

/// Writes a line where a person reads it, else nothing.
pub fn tell(text: &str) {
    if logs::has_person() {
        // A server without a terminal goes on.
        progress::suspend(|| drop(writeln!(stderr(), "{text}")));
    }
}

/// The URL by which this machine reaches a server that listens on `address`.
pub fn local_url(scheme: &str, address: SocketAddr) -> String {
    let host: IpAddr = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => [127, 0, 0, 1].into(),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    format!("{scheme}://{}", SocketAddr::new(host, address.port()))
}

/// The URLs by which other machines reach it: its addresses in networks, if it listens on all of them.
fn network_urls(scheme: &str, address: SocketAddr) -> Vec<String> {
    let own = if_addrs::get_if_addrs().unwrap_or_default().into_iter().map(|interface| interface.ip());
    network_addresses(address, own).iter().map(|address| format!("{scheme}://{address}")).collect()
}

fn network_addresses(listens: SocketAddr, own: impl Iterator<Item = IpAddr>) -> Vec<SocketAddr> {
    let at = |ip| SocketAddr::new(ip, listens.port());
    match listens.ip() {
        ip if ip.is_loopback() => Vec::new(),
        ip if !ip.is_unspecified() => vec![at(ip)],
        all => {
            let is_usable = |ip: &IpAddr| match ip {
                IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
                // An address of one link needs the name of an interface on the other machine.
                IpAddr::V6(ip) => all.is_ipv6() && !ip.is_loopback() && !ip.is_unicast_link_local(),
            };
            let mut usable: Vec<IpAddr> = own.filter(is_usable).collect();
            usable.sort_by_key(IpAddr::is_ipv6);
            usable.into_iter().take(ADDRESSES_MAX).map(at).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greeting(network: &[&str], has_keys: bool) -> String {
        let network: Vec<_> = network.iter().map(|&url| url.to_owned()).collect();
        let (url, models) = ("http://127.0.0.1:8000".to_owned(), vec!["tiny".to_owned(), "small".to_owned()]);
        let is_open = !network.is_empty();
        Greeting { url, is_open, network, has_keys, models }.to_string()
    }

    #[test]
    fn a_person_learns_where_the_server_is_and_how_to_connect() {
        let text = greeting(&[], false);
        for words in [
            "consort serves tiny, small on http://127.0.0.1:8000\n",
            "chat page   http://127.0.0.1:8000/\n",
            "OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none\n",
            "-m tiny ",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(!text.contains("warning") && !text.contains("network"), "{text}");
        assert_eq!(
            ready("tiny", Duration::from_millis(1234), 4096),
            "tiny is ready after 1.2 s, with a context of 4096 tokens"
        );
    }

    #[test]
    fn a_server_that_others_reach_warns_if_it_has_no_key() {
        let network = ["http://10.0.0.2:8000", "http://10.1.0.2:8000"];
        let open = greeting(&network, false);
        assert!(open.contains("network     http://10.0.0.2:8000\n              http://10.1.0.2:8000\n"), "{open}");
        assert!(open.contains("warning: no API key is set"), "{open}");
        let guarded = greeting(&network, true);
        assert!(!guarded.contains("warning") && guarded.contains("OPENAI_API_KEY=YOUR_KEY"), "{guarded}");
    }

    #[test]
    fn addresses_are_those_that_others_reach() {
        let own = ["127.0.0.1", "::1", "fe80::1", "169.254.1.1", "2001:db8::2", "10.0.0.2"];
        let check = |listens: &str, local: &str, expected: &[&str]| {
            let listens: SocketAddr = listens.parse().unwrap();
            let found = network_addresses(listens, own.iter().map(|ip| ip.parse().unwrap()));
            assert_eq!(found.iter().map(ToString::to_string).collect::<Vec<_>>(), expected, "{listens}");
            assert_eq!(local_url("http", listens), format!("http://{local}"));
        };
        check("127.0.0.1:8000", "127.0.0.1:8000", &[]);
        check("0.0.0.0:8000", "127.0.0.1:8000", &["10.0.0.2:8000"]);
        check("[::]:8000", "[::1]:8000", &["10.0.0.2:8000", "[2001:db8::2]:8000"]);
        check("10.0.0.2:80", "10.0.0.2:80", &["10.0.0.2:80"]);
    }
}
