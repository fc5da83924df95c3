//! How a rank joins the group of its supervisor: by a segment that it made, or by the addresses of ranks on other hosts.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use net::ClusterKey;
use tracing::info;
use types::WorldSize;

use super::{RankServer, count};
use crate::protocol::join::{Activations, JoinTimeouts, Secret};
use crate::protocol::{ErrorKind, RankReply};
use crate::worker::request_error::RequestError;
use collectives::EXCHANGE_ELEMENTS_MAX;
use collectives::shared_memory::{Epoch, GroupLimits, Segment};
use collectives::tcp::{TcpComm, TcpCommOptions, TcpGroup};

impl RankServer {
    /// Checks that the request names this rank and world size.
    pub(super) fn check_rank(&self, world_size: u16, rank: u16) -> Result<(), RequestError> {
        let asked = WorldSize::new(world_size).and_then(|world| world.rank(rank));
        if asked == Some(self.rank) {
            return Ok(());
        }
        Err(RequestError::new(ErrorKind::BadRequest, format!("this is rank {}, not {rank}/{world_size}", self.rank)))
    }

    pub(super) fn attach(&mut self, segment_fd: u32, elements_max: u64, epoch: Epoch) -> Result<(), RequestError> {
        let limits = GroupLimits { world: self.rank.world(), elements_max: count(elements_max)? };
        let segment = Segment::attach(inherited(segment_fd)?, limits)?;
        let comm = segment.join(self.rank, epoch)?;
        self.neuron.leave();
        self.collective.join(comm)?;
        self.forget_sessions();
        info!(rank = self.rank.index(), %epoch, "joined the group");
        Ok(())
    }

    pub(super) fn listen(&mut self, id: u64, host: IpAddr) -> Result<RankReply, RequestError> {
        let failed = |error: io::Error| {
            RequestError::new(ErrorKind::NcclInitFailed, format!("can not listen at {host}: {error}"))
        };
        let listener = bind(host).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        self.listener = Some(listener);
        Ok(RankReply::Listening { id, port })
    }

    pub(super) fn join(
        &mut self,
        epoch: Epoch,
        addresses: &[SocketAddr],
        key: &Secret,
        encoding: Activations,
        timeouts: JoinTimeouts,
    ) -> Result<(), RequestError> {
        // The port is closed when all ranks are connected, or connecting has failed.
        let unasked = || RequestError::new(ErrorKind::BadRequest, "`listen` comes before `join`");
        let listener = self.listener.take().ok_or_else(unasked)?;
        let group = TcpGroup { rank: self.rank, listener: &listener, addresses, epoch };
        let options = TcpCommOptions {
            elements_max: EXCHANGE_ELEMENTS_MAX,
            encoding: encoding.into(),
            stall_deadline: timeouts.stall()?,
            silence_deadline: timeouts.silence()?,
        };
        let (key, deadline) = (ClusterKey::from_bytes(key.bytes()), Instant::now() + timeouts.connect()?);
        self.neuron.leave();
        let connected = self.collective.connect(epoch, |abort| TcpComm::connect(group, &key, options, abort, deadline));
        self.forget_sessions();
        connected?;
        info!(rank = self.rank.index(), %epoch, "joined the ranks of other hosts");
        Ok(())
    }
}

/// Binds a free port of `host`. If that is not an address of this machine, as behind NAT, binds all addresses.
fn bind(host: IpAddr) -> io::Result<TcpListener> {
    let all: &[IpAddr] = match host {
        IpAddr::V4(_) => &[IpAddr::V4(Ipv4Addr::UNSPECIFIED)],
        // IPv6 and IPv4 together, where the system supports both.
        IpAddr::V6(_) => &[IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)],
    };
    let bind = |&host: &IpAddr| TcpListener::bind((host, 0));
    bind(&host).or_else(|error| all.iter().find_map(|host| bind(host).ok()).ok_or(error))
}

/// Opens an inherited memfd again. The inherited descriptor stays open, because a later epoch attaches to it again.
fn inherited(fd: u32) -> Result<OwnedFd, RequestError> {
    let path = PathBuf::from(format!("/proc/self/fd/{fd}"));
    let failed =
        |why: String| RequestError::new(ErrorKind::NcclInitFailed, format!("descriptor {fd} is no segment: {why}"));
    // Opening anything but a memfd again may have side effects: it may be a device or a pipe.
    let target = fs::read_link(&path).map_err(|error| failed(error.to_string()))?;
    if !target.as_os_str().as_encoded_bytes().starts_with(b"/memfd:") {
        return Err(failed("it is no memory file".to_owned()));
    }
    let file = fs::OpenOptions::new().read(true).write(true).open(path).map_err(|error| failed(error.to_string()))?;
    Ok(file.into())
}
