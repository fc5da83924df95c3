//! `ReservedPort`: a port of loopback that no other program gets by chance.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketType, bind, socket};

/// Connections to it are refused until a program listens there.
pub struct ReservedPort(TcpListener);

impl ReservedPort {
    pub fn reserve() -> Self {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        // So programs that say the same may listen there.
        set_socket_reuseaddr(&socket, true).unwrap();
        bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        Self(TcpListener::from(socket))
    }

    pub fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }
}
