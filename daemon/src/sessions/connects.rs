//! How often a user may connect, and how often the log speaks of it: a client in a connect loop costs itself alone.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use llmd_protocol::limits::{CONNECT_BURST_PER_UID, CONNECTS_PER_UID_PER_S};

/// Users remembered at once. Beyond it those whose bucket is full again are forgotten; there are far fewer users on a host.
const USERS_MAX: usize = 4096;

/// How long the log is silent about a user after a line about it.
const SILENCE: Duration = Duration::from_secs(1);

/// When the log last spoke of each user's refused connects.
#[derive(Debug, Default)]
pub struct Complaints {
    users: HashMap<u32, (Instant, u32)>,
}

impl Complaints {
    /// Whether a refusal of `uid` is to be logged now; if so, how many since its last line were not.
    pub fn due(&mut self, uid: u32, now: Instant) -> Option<u32> {
        let over = |at: Instant| now.saturating_duration_since(at) >= SILENCE;
        if self.users.len() >= USERS_MAX {
            self.users.retain(|_, (at, _)| !over(*at));
        }
        match self.users.get_mut(&uid) {
            Some((at, unsaid)) if !over(*at) => {
                *unsaid += 1;
                None
            }
            last => {
                let unsaid = last.map_or(0, |(_, unsaid)| *unsaid);
                self.users.insert(uid, (now, 0));
                Some(unsaid)
            }
        }
    }
}

/// A token bucket for each user.
#[derive(Debug, Default)]
pub struct ConnectRate {
    buckets: HashMap<u32, Bucket>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    /// Connects left at `at`.
    left: f64,
    at: Instant,
}

impl Bucket {
    fn left_at(self, now: Instant) -> f64 {
        let gained = now.saturating_duration_since(self.at).as_secs_f64() * f64::from(CONNECTS_PER_UID_PER_S);
        (self.left + gained).min(f64::from(CONNECT_BURST_PER_UID))
    }
}

impl ConnectRate {
    /// Whether `uid` may connect now; if so, it has.
    pub fn allow(&mut self, uid: u32, now: Instant) -> bool {
        if self.buckets.len() >= USERS_MAX {
            self.buckets.retain(|_, bucket| bucket.left_at(now) < f64::from(CONNECT_BURST_PER_UID));
        }
        let full = Bucket { left: f64::from(CONNECT_BURST_PER_UID), at: now };
        let bucket = self.buckets.entry(uid).or_insert(full);
        let left = bucket.left_at(now);
        let allowed = left >= 1.0;
        *bucket = Bucket { left: if allowed { left - 1.0 } else { left }, at: now };
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_hears_of_a_user_once_a_second() {
        let mut complaints = Complaints::default();
        let now = Instant::now();
        assert_eq!(complaints.due(1, now), Some(0));
        assert_eq!(complaints.due(1, now), None);
        assert_eq!(complaints.due(1, now + SILENCE / 2), None);
        assert_eq!(complaints.due(2, now), Some(0), "another user has a line of its own");
        assert_eq!(complaints.due(1, now + SILENCE), Some(2));
        assert_eq!(complaints.due(1, now + SILENCE), None);
        let users = 3 * USERS_MAX as u32;
        for uid in 0..users {
            let _ = complaints.due(uid, now + 3 * SILENCE + Duration::from_millis(uid.into()));
        }
        assert!(complaints.users.len() <= USERS_MAX, "{} users remembered", complaints.users.len());
    }

    #[test]
    fn a_burst_is_allowed_a_loop_is_not_and_others_do_not_notice() {
        let mut rate = ConnectRate::default();
        let now = Instant::now();
        let allowed = (0..2 * CONNECT_BURST_PER_UID).filter(|_| rate.allow(1, now)).count();
        assert_eq!(allowed as u32, CONNECT_BURST_PER_UID);
        assert!(rate.allow(2, now));
        let later = now + Duration::from_secs(1);
        let again = (0..2 * CONNECTS_PER_UID_PER_S).filter(|_| rate.allow(1, later)).count();
        assert_eq!(again as u32, CONNECTS_PER_UID_PER_S);
    }
}
