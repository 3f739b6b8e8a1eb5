// How the kernels configure the matrix unit. Included once per instruction set, as what includes
// it.

using Tiles = EAGLE2_TILES;

// Tiles 0 to 3 hold sums, 4 and 5 rows of A, 6 and 7 words of B. Both kinds of rows are as many as
// there are: a row of the unit is a row of memory.
thread_local int configured_rows;

inline void configure_tiles(int rows) {
  if (rows == configured_rows) return;
  configured_rows = rows;
  TileConfig config{};
  config.palette = 1;
  const auto set = [&](int tile, int count) {
    config.rows[tile] = static_cast<uint8_t>(count);
    config.row_bytes[tile] = 64;
  };
  const int first = std::min(rows, 16), second = rows > 16 ? rows - 16 : first;
  for (const int tile : {0, 1, 4}) set(tile, first);
  for (const int tile : {2, 3, 5}) set(tile, second);
  for (const int tile : {6, 7}) set(tile, 16);
  Tiles::configure(config);
}

// While a task runs the unit is its own. Other libraries' configuration is put back afterwards.
class TileScope {
 public:
  TileScope() {
    Tiles::save(&before_);
    configured_rows = 0;
  }
  ~TileScope() {
    if (before_.palette == 0) {
      Tiles::release();
    } else {
      Tiles::configure(before_);
    }
  }

 private:
  TileConfig before_;
};
