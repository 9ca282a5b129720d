"""Steps from one version of the schema to the next.  A released one is never edited."""

from __future__ import annotations

__all__ = ["V2", "V3", "V4", "V5"]

V2 = """
-- When the bytes of a replica were last hashed; the scrub takes the oldest first.
ALTER TABLE replica ADD COLUMN verified_at REAL;
CREATE INDEX replica_scrub ON replica (place, verified_at);

-- Chunks that a further place is still to get.  A row goes with the receipt: the replica.
CREATE TABLE outbox (
  content TEXT NOT NULL REFERENCES part (content) ON DELETE CASCADE,
  place TEXT NOT NULL,
  tries INTEGER NOT NULL DEFAULT 0,
  due_at REAL NOT NULL,
  taken_by TEXT,
  taken_until REAL,
  error TEXT NOT NULL DEFAULT '',
  created_at REAL NOT NULL,
  PRIMARY KEY (content, place)
) STRICT, WITHOUT ROWID;
CREATE INDEX outbox_due ON outbox (place, due_at);
CREATE TRIGGER outbox_done AFTER INSERT ON replica BEGIN
  DELETE FROM outbox WHERE content = new.content AND place = new.place;
END;

-- Chains that somebody reads now: nothing above their end may go.
CREATE TABLE lease (
  chain TEXT NOT NULL,
  token TEXT NOT NULL,
  holder TEXT NOT NULL,
  at REAL NOT NULL,
  ttl REAL NOT NULL CHECK (ttl > 0),
  PRIMARY KEY (chain, token)
) STRICT, WITHOUT ROWID;

-- What tools with a stable output returned, for guesses after a resume; sealed like `run`.
CREATE TABLE tool_output (
  id INTEGER PRIMARY KEY,
  session TEXT NOT NULL REFERENCES session (id) ON DELETE CASCADE,
  tool TEXT NOT NULL,
  ids BLOB NOT NULL,
  at REAL NOT NULL
) STRICT;
CREATE INDEX tool_output_session ON tool_output (session, tool);

-- Totals since the store was made; events are kept for a while only.
CREATE TABLE counter (
  name TEXT PRIMARY KEY,
  value REAL NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO counter SELECT 'event_' || kind, count(*) FROM event GROUP BY kind;
CREATE TRIGGER event_counted AFTER INSERT ON event BEGIN
  INSERT INTO counter VALUES ('event_' || new.kind, 1)
    ON CONFLICT (name) DO UPDATE SET value = value + 1;
END;
"""

V3 = """
-- Of a move to memory: what the piece that decided was worth, by the policy's measure, and the most
-- that had to go for it was; NULL if nothing had to.  The choice can be made again from them.
ALTER TABLE decision ADD COLUMN worth REAL;
ALTER TABLE decision ADD COLUMN against REAL;
"""

V4 = """
-- Names of the places where a part lies, with commas between: a look-up then reads no replica,
-- whose rows are scattered over the file.  Kept by triggers of `replica`, which stays the truth.
ALTER TABLE part ADD COLUMN places TEXT NOT NULL DEFAULT '';
UPDATE part SET places =
  coalesce((SELECT group_concat(place) FROM replica WHERE content = part.content), '');
DROP TRIGGER replica_added;
CREATE TRIGGER replica_added AFTER INSERT ON replica BEGIN
  INSERT INTO place (name, used, parts) VALUES (new.place, new.used, 1)
    ON CONFLICT (name) DO UPDATE SET used = used + new.used, parts = parts + 1;
  UPDATE part SET places = iif(places = '', new.place, places || ',' || new.place)
    WHERE content = new.content;
END;
DROP TRIGGER replica_gone;
CREATE TRIGGER replica_gone AFTER DELETE ON replica BEGIN
  UPDATE place SET used = used - old.used, parts = parts - 1 WHERE name = old.place;
  UPDATE part SET places =
    coalesce((SELECT group_concat(place) FROM replica WHERE content = old.content), '')
    WHERE content = old.content;
  DELETE FROM part WHERE content = old.content AND places = '';
END;

-- What tenants were charged in other stores, by the id of the store: as bundles from there said.
-- A charge never shrinks, so of two that come from one store the larger is the later.
CREATE TABLE bill (
  tenant TEXT NOT NULL,
  store TEXT NOT NULL,
  charged REAL NOT NULL,
  PRIMARY KEY (tenant, store)
) STRICT, WITHOUT ROWID;
INSERT INTO meta VALUES ('store', lower(hex(randomblob(16))));
"""

V5 = """
-- The key that opens a part, in hex, and '' for one that is not sealed: after a change of keys each
-- finds its own.  NULL: noted by an older version, which did not say; the file's header does.
-- A table is made anew to change what is unique, with foreign keys off (`schema.connect`).
PRAGMA legacy_alter_table = ON;  -- triggers of other tables name this one
CREATE TABLE part_v5 (
  content TEXT PRIMARY KEY,
  chunk INTEGER NOT NULL REFERENCES chunk (id) ON DELETE CASCADE,
  format TEXT NOT NULL,
  key TEXT,
  bytes INTEGER NOT NULL,
  places TEXT NOT NULL DEFAULT '',
  UNIQUE (chunk, format, key)
) STRICT;
INSERT INTO part_v5 SELECT content, chunk, format, NULL, bytes, places FROM part;
DROP TABLE part;
ALTER TABLE part_v5 RENAME TO part;
PRAGMA legacy_alter_table = OFF;
CREATE TRIGGER part_gone AFTER DELETE ON part BEGIN
  DELETE FROM chunk WHERE id = old.chunk
    AND NOT EXISTS (SELECT 1 FROM part WHERE chunk = old.chunk);
END;
CREATE TRIGGER part_fixed BEFORE UPDATE OF content, chunk, format ON part BEGIN
  SELECT RAISE (ABORT, 'a part never changes');
END;
CREATE TRIGGER part_key_fixed BEFORE UPDATE OF key ON part WHEN old.key IS NOT NULL BEGIN
  SELECT RAISE (ABORT, 'a part never changes');
END;
"""
