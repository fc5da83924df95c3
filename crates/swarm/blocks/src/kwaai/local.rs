//! The local TCP bypass: a listener for coordinators on the same host, or wherever the operator lets them in. Nobody proves who
//! he is, so a client is an address.

use std::time::Duration;

use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tracing::{debug, warn};

use super::server::KwaaiServer;
use crate::block::Client;

/// How long the listener waits when the system has no room for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until it is dropped; then all connections end. A connection has one call, and counts among its address's calls from
/// its beginning.
pub async fn serve_local(server: KwaaiServer, listener: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, address)) => {
                    let server = server.clone();
                    connections.spawn(async move {
                        // Without it a reply only comes later.
                        let _ = stream.set_nodelay(true);
                        let client = Client::Address(address.ip().to_canonical());
                        if let Err(error) = server.serve_local_connection(client, stream).await {
                            debug!(%address, %error, "a call over KwaaiNet's local TCP was not answered");
                        }
                    });
                }
                Err(error) => {
                    warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}
