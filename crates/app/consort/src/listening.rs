//! Why an address cannot be listened on, in words that say what to do.

use std::io;

use anyhow::{Error, anyhow};

use crate::running_servers;
use crate::server_client::port;

/// `option` is the one that chooses another address.
pub fn explain(address: &str, option: &str, error: &io::Error) -> Error {
    let rival = match error.kind() {
        io::ErrorKind::AddrInUse => server_at(address),
        _ => None,
    };
    anyhow!(sentence(address, option, error, rival.as_deref()))
}

/// The consort server of this user that has the port.
fn server_at(address: &str) -> Option<String> {
    let taken: u16 = address.rsplit_once(':')?.1.parse().ok()?;
    let servers = running_servers::list().ok()?;
    let server = servers.into_iter().find(|server| port(&server.url).is_ok_and(|port| port == taken))?;
    Some(format!("your server at {} (process {}; `consort stop {taken}` ends it)", server.url, server.pid))
}

fn sentence(address: &str, option: &str, error: &io::Error, rival: Option<&str>) -> String {
    let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            let rival = rival.unwrap_or("another program");
            format!("port {port} is in use by {rival}: choose another with {option}")
        }
        io::ErrorKind::PermissionDenied => {
            format!("this user may not listen on port {port}: choose one from 1024 on with {option}")
        }
        io::ErrorKind::AddrNotAvailable => {
            format!("this machine has no address {host}: 0.0.0.0 is all that it has, 127.0.0.1 is for itself alone")
        }
        // The system does not know the name.
        _ if error.raw_os_error().is_none() => format!("{host} is no address of this machine: {error}"),
        _ => format!("listen on {address}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_refuses_is_a_sentence_with_a_way_out() {
        let check = |kind: io::ErrorKind, rival, expected: &str| {
            assert_eq!(sentence("127.0.0.1:80", "--port", &kind.into(), rival), expected);
        };
        check(io::ErrorKind::AddrInUse, None, "port 80 is in use by another program: choose another with --port");
        check(io::ErrorKind::AddrInUse, Some("x"), "port 80 is in use by x: choose another with --port");
        check(
            io::ErrorKind::PermissionDenied,
            None,
            "this user may not listen on port 80: choose one from 1024 on with --port",
        );
        check(
            io::ErrorKind::AddrNotAvailable,
            None,
            "this machine has no address 127.0.0.1: 0.0.0.0 is all that it has, 127.0.0.1 is for itself alone",
        );
        let unknown = io::Error::other("no such name");
        let text = sentence("attic.example:80", "--host", &unknown, None);
        assert_eq!(text, "attic.example is no address of this machine: no such name");
    }
}
