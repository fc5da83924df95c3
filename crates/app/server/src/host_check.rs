//! The check of `Host` on a server without API keys.
//!
//! A page in somebody's browser can make its own name resolve to the address of this server (DNS rebinding), and then call
//! it as its own origin. Such a request still has the page's name in `Host`, so only names of this server are accepted.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::header::HOST;
use axum::middleware::Next;
use axum::response::Response;

use crate::app::SharedApp;
use crate::error::{ApiError, ApiErrorKind};
use crate::excerpt::excerpt;

/// Middleware that accepts requests to names of this server.
pub async fn require(State(app): State<SharedApp>, request: Request, next: Next) -> Result<Response, ApiError> {
    check(&request, &app.config().allowed_hosts)?;
    Ok(next.run(request).await)
}

/// Accepts a request whose host is an address, `localhost` or one of `allowed`. A request without a host is accepted:
/// browsers always send one.
pub fn check(request: &Request, allowed: &[String]) -> Result<(), ApiError> {
    let authority = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    let headers = request.headers().get_all(HOST).iter().map(|value| value.as_bytes());
    for given in authority.into_iter().chain(headers) {
        let given = String::from_utf8_lossy(given);
        if !is_allowed(&given, allowed) {
            let message = format!(
                "this server is not known as `{}`: start it with --allowed-host NAME, or with API keys",
                excerpt(&given)
            );
            return Err(ApiError::new(ApiErrorKind::Forbidden, message).code("host_not_allowed"));
        }
    }
    Ok(())
}

fn is_allowed(given: &str, allowed: &[String]) -> bool {
    let host = without_port(given);
    if let Some(address) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return address.parse::<IpAddr>().is_ok_and(|address| address.is_ipv6());
    }
    let name = host.strip_suffix('.').unwrap_or(host);
    name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || allowed.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
}

/// The host of `host:port`; the host of an IPv6 address keeps its brackets.
fn without_port(given: &str) -> &str {
    match given.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !host.ends_with(':') => host,
        _ => given,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    #[test]
    fn addresses_and_known_names_are_accepted_and_no_other() {
        let allowed = ["gpu.lan".to_owned()];
        let accepted =
            ["127.0.0.1", "10.1.2.3:8000", "[::1]", "[2001:db8::1]:80", "localhost:8000", "LOCALHOST.", "GPU.lan:1"];
        for host in accepted {
            assert!(is_allowed(host, &allowed), "{host}");
        }
        for host in
            ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "[evil]", "gpu", "[::1", "a:b"]
        {
            assert!(!is_allowed(host, &allowed), "{host}");
        }
    }

    #[test]
    fn every_host_of_a_request_is_checked() {
        let request = |uri: &str, hosts: &[&str]| {
            let request = Request::get(uri);
            hosts.iter().fold(request, |request, host| request.header(HOST, *host)).body(Body::empty()).unwrap()
        };
        assert!(check(&request("/", &[]), &[]).is_ok());
        assert!(check(&request("/", &["localhost"]), &[]).is_ok());
        assert!(check(&request("http://localhost/", &[]), &[]).is_ok());
        for (uri, hosts) in [("/", &["evil"][..]), ("/", &["localhost", "evil"]), ("http://evil/", &["localhost"])] {
            let error = check(&request(uri, hosts), &[]).unwrap_err();
            assert_eq!((error.status().as_u16(), error.code), (403, Some("host_not_allowed")));
            assert!(error.message.contains("`evil`"), "{error}");
        }
    }
}
